"""How old what a reader has is, measured over its last minutes: the age grows with time, and falls when a newer version comes.

Owned by a reader, under its lock. What always holds: every moment counts alike, not every version.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from torchquorum.clock import Clock
from torchquorum.wire.messages import ReaderAges

MOST_STRETCHES = 2000
POINTS = 8  # of a stretch of time that stand for it


class Freshness:
    """The ages of what a reader had."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stretches: deque[tuple[float, float]] = deque(maxlen=MOST_STRETCHES)  # how long, and the age at its end
        self._since: tuple[float, float] | None = None  # when the present stretch began, and the age then
        self._stopped = False

    @property
    def age_s(self) -> float:
        """Returns how old what the reader has is now; 0 if it has nothing."""
        return 0.0 if self._since is None else self._since[1] + self._clock.now() - self._since[0]

    def took(self, age_s: float) -> None:
        """A version was taken that was made so many seconds ago."""
        now = self._clock.now()
        if self._since is not None and not self._stopped:
            lasted_s = now - self._since[0]
            self._stretches.append((lasted_s, self._since[1] + lasted_s))
        self._since = (now, max(0.0, age_s))

    def stop(self) -> None:
        """No newer version will come: from now on no age counts."""
        self._stopped = True

    def ages(self) -> ReaderAges | None:
        """Returns median and 99th percentile; None if nothing was taken yet."""
        if self._since is None:
            return None
        stretches = list(self._stretches)
        if not self._stopped or not stretches:
            lasted_s = self._clock.now() - self._since[0]
            stretches.append((lasted_s, self._since[1] + lasted_s))
        length = np.array([max(1e-9, lasted) for lasted, _ in stretches])
        last = np.array([age for _, age in stretches])
        parts = (np.arange(POINTS) + 0.5) / POINTS
        ages = (last[:, None] - length[:, None] * (1 - parts)).reshape(-1)
        weights = np.repeat(length / POINTS, POINTS)
        order = np.argsort(ages)
        sums = np.cumsum(weights[order])
        p50, p99 = (float(ages[order][np.searchsorted(sums, q * sums[-1])]) for q in (0.5, 0.99))
        return ReaderAges(round(max(0.0, p50), 6), round(max(0.0, p99), 6), round(self.age_s, 6))
