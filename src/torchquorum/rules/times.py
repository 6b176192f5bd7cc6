"""How long workers take for a step, estimated from the times that were seen.

The one estimator of times: the number of gradients to wait for is chosen by it (`rules/backup.py`); grace times and numbers of local
steps can be. Pure: `now` is an argument. What always holds: only the last `WINDOW` steps of a worker count, and of these only
those since its speed changed, so a change is seen within `CLEAR` steps; the first step of a worker, which has its start-up in
it, does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

WINDOW = 16
CLEAR = 3  # so many steps in a row that are all clearly longer, or shorter, than every one before them are a new speed

CLEARLY = 1.2


@dataclass(slots=True)
class _Steps:
    """The steps of one worker: the seconds of the last ones, when the one that it computes began, and whether it is the first."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    began_at: float | None = None
    first: bool = True


class StepTimes:
    """The times of all workers' steps.

    Attributes:
        changes: How often something new was learnt of a worker's speed: it began, its first steps ended, or it changed.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._steps: dict[int, _Steps] = {}

    # -- what happens -------------------------------------------------------------------------------------------------

    def joins(self, worker: int) -> None:
        """A process begins: what was known of its predecessor may be untrue of it."""
        self._steps[worker] = _Steps()
        self.changes += 1

    def begins(self, worker: int, now: float) -> None:
        """A worker begins a step."""
        self._steps[worker].began_at = now

    def pauses(self, worker: int) -> None:
        """A worker has nothing to compute, so the time that passes says nothing."""
        self._steps[worker].began_at = None

    def ends(self, worker: int, now: float) -> None:
        """A worker's step has ended: its gradient is here."""
        steps = self._steps[worker]
        began_at, first = steps.began_at, steps.first
        steps.began_at, steps.first = None, False
        if began_at is None or first:
            return
        steps.seconds.append(max(0.0, now - began_at))
        changed = _is_new_speed(steps.seconds)
        while changed and len(steps.seconds) > CLEAR:
            steps.seconds.popleft()
        self.changes += changed or len(steps.seconds) == CLEAR

    # -- queries ------------------------------------------------------------------------------------------------------

    def known(self, worker: int) -> int:
        """Returns how many steps of a worker count."""
        steps = self._steps.get(worker)
        return len(steps.seconds) if steps is not None else 0

    def expected(self, worker: int, now: float) -> list[float]:
        """Returns what the next steps of a worker may take, each as likely as the others; none if nothing is known.

        A step that has taken longer than all that were seen is expected to take as long again: then its worker is slower now.
        """
        steps = self._steps.get(worker)
        if steps is None or not steps.seconds:
            return []
        running = now - steps.began_at if steps.began_at is not None else 0.0
        return [2.0 * running] if running > 2.0 * max(steps.seconds) else list(steps.seconds)

    def remaining(self, worker: int, now: float, share: float = 0.5) -> float | None:
        """Returns within which time this share of the steps that a worker may be computing will have ended; None if nothing is known.

        One that has taken longer than all that were seen is expected to take as long again.
        """
        steps = self._steps.get(worker)
        if steps is None or not steps.seconds or steps.began_at is None:
            return None
        running = now - steps.began_at
        left = [seconds - running for seconds in steps.seconds if seconds > running]
        return quantile(left, share) if left else running

    def quantile(self, worker: int, share: float) -> float | None:
        """Returns the seconds within which this share of a worker's steps ended; None if nothing is known."""
        steps = self._steps.get(worker)
        return quantile(steps.seconds, share) if steps is not None and steps.seconds else None


def quantile(values: Iterable[float], share: float) -> float:
    """Returns the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def _is_new_speed(seconds: deque[float]) -> bool:
    """Whether the last steps are all longer, or all shorter, than every one before them, of which there are enough."""
    if len(seconds) < 2 * CLEAR:
        return False
    *before, a, b, c = seconds
    return min(a, b, c) > CLEARLY * max(before) or CLEARLY * max(a, b, c) < min(before)
