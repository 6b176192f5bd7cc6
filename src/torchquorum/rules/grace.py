"""How long a round that has enough gradients stays open for those that are about to come: `Sync(k, grace=...)`.

Owned by a track of the quorum. With a number of seconds a round closes so long after its k-th gradient, or as soon as all live workers
have given. With "auto" the time follows from the workers' steps (`torchquorum.rules.times`): of the workers that are missing, those are
waited for with which the most gradients are in per second, counted from the round's beginning, and so long that they nearly surely come.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchquorum.rules.times import StepTimes

SURELY = 0.95  # the share of a worker's steps that have ended when it is not waited for any longer
LONGER = 1.1


class Grace:
    """The grace of the rounds of one track.

    Args:
        seconds: How long; None to choose.

    Attributes:
        times: The workers' times, where they are needed; the quorum tells it what happens.
        until: When the round that is open and has enough gradients closes at the latest; None if there is none.
    """

    def __init__(self, seconds: float | None) -> None:
        self.times = StepTimes() if seconds is None else None
        self._seconds = seconds
        self.until: float | None = None

    def holds(self, given: int, missing: Sequence[int], began_at: float, now: float) -> bool:
        """Whether a round that has enough gradients stays open.

        Args:
            given: How many gradients it has.
            missing: The live workers that have given none.
            began_at: When it began.
            now: The time.
        """
        if not missing:
            return False
        if self.until is None:
            self.until = now + (
                self._seconds if self._seconds is not None else self._choose(given, missing, began_at, now)
            )
        return now < self.until

    def is_over(self, now: float) -> bool:
        """Whether a round stays open whose grace is over."""
        return self.until is not None and now >= self.until

    def closed(self) -> None:
        """The round has closed."""
        self.until = None

    def _choose(self, given: int, missing: Sequence[int], began_at: float, now: float) -> float:
        """Returns how long it pays to wait; not for workers of which nothing is known."""
        assert self.times is not None
        left = sorted((s, i) for i in missing if (s := self.times.remaining(i, now)) is not None)
        best, grace, surely = given / max(now - began_at, 1e-9), 0.0, 0.0
        for k, (seconds, worker) in enumerate(left, 1):
            surely = max(surely, self.times.remaining(worker, now, SURELY) or 0.0)
            rate = (given + k) / max(now - began_at + seconds, 1e-9)
            if rate > best:
                best, grace = rate, LONGER * surely
        return grace
