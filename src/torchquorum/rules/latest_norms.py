"""The norms of the latest gradients that became part of the variables, and which of them stands out.

Owned by the run's history on ps task 0, and used by the report. Pure. When a loss or a gradient is not finite any more, the cause is
often a gradient before it that was finite and far too large; it was accepted, so nothing else tells whose it was.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

LATEST = 256
STANDS_OUT = 1000.0


class LargeNorm(NamedTuple):
    """A gradient that is much larger than the others.

    Attributes:
        norm: Its norm.
        worker: Whose it is.
        local_step: Its number.
        version: The version that it met.
        usual: The median norm of the gradients around it; None if there were none.
    """

    norm: float
    worker: int
    local_step: int
    version: int
    usual: float | None

    def __str__(self) -> str:
        times = self.norm / self.usual if self.usual else math.inf
        others = f", {times:.2g} times the median of the others" if math.isfinite(times) else ""
        return (
            f"the gradient of /job:worker/task:{self.worker}, local step {self.local_step}, at global step {self.version} has the "
            f"norm {self.norm:.3g}{others}"
        )


class LatestNorms:
    """What the latest gradients were like that count."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, int, int, int]] = deque(maxlen=LATEST)

    def note(self, norm: float, worker: int, local_step: int, version: int) -> None:
        """A gradient was accepted at a version."""
        self._latest.append((norm, worker, local_step, version))

    def take_largest(self) -> LargeNorm | None:
        """Returns the one that stands out, if one does, and begins again, so that it is told once."""
        if not self._latest:
            return None
        largest = max(self._latest)
        others = sorted(norm for norm, *_ in self._latest)[:-1]
        usual = others[len(others) // 2] if others else None
        if usual is not None and largest[0] < STANDS_OUT * usual:
            return None
        self._latest.clear()
        return LargeNorm(*largest, usual)
