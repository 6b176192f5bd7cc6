"""How fast a run goes, as one screen shows it: all figures are of the same seconds, and say of which.

Used by the live view, from the statuses that it is shown, and by `status`, from one status alone. What always holds: the batches/s of the
workers add up to those of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW_S = 5.0
LEAST_S = 0.5  # less says nothing
LEFT_S = 20.0  # the time left follows a longer time, so that it does not jump
REMEMBER_S = 3.0  # shows for whom a worker waited for this long: at the moment of asking it may be computing


@dataclass(frozen=True)
class WorkerSpeed:
    """What one worker did in those seconds: batches/s, the share of time it waited, and for whom; None where unknown."""

    batches_per_s: float
    waits: float | None
    waits_for: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Speeds:
    """The speeds of a run.

    Attributes:
        over: Of which time they are, in words.
        updates_per_s: Of the run.
        workers: By index.
        optimizers: Updates/s of each of several optimizers.
    """

    over: str
    updates_per_s: float
    workers: dict[str, WorkerSpeed]
    optimizers: dict[str, float] = field(default_factory=dict)

    @property
    def batches_per_s(self) -> float:
        """Returns the batches/s of all workers together."""
        return sum(worker.batches_per_s for worker in self.workers.values())

    def __str__(self) -> str:
        return f"{self.over}: {_short(self.updates_per_s)} updates/s, {_short(self.batches_per_s)} batches/s"


def of_whole_run(status: Mapping[str, Any]) -> Speeds:
    """Returns the speeds since the run began."""
    seconds = float(status.get("seconds") or 0.0)
    workers = {}
    for index, w in status["per_worker"].items():
        own = float(w.get("seconds") or 0.0)
        waits = min(1.0, float(w["waited_s"]) / own) if own > 0 else None
        workers[index] = WorkerSpeed(_rate(w["batches"], seconds), waits, w.get("waits_for"))
    optimizers = {name: _rate(of["version"], seconds) for name, of in (status.get("optimizers") or {}).items()}
    return Speeds("whole run", _rate(status.get("updates", 0), seconds), workers, optimizers)


class RecentSpeeds:
    """The speeds over the last seconds, from statuses as they come."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, Any]]] = deque()
        self._named: dict[str, tuple[float, Mapping[str, Any]]] = {}

    def note(self, status: dict[str, Any], now: float) -> None:
        """Takes the newest status."""
        self._seen.append((now, status))
        while now - self._seen[0][0] > LEFT_S:
            self._seen.popleft()
        for index, worker in status["per_worker"].items():
            if worker.get("waits_for"):
                self._named[index] = now, worker["waits_for"]

    @property
    def steps_per_s(self) -> float:
        """Returns how fast the global step grows, for the time left; 0 while that is unknown."""
        (then, before), (now, newest) = self._seen[0], self._seen[-1]
        grown = newest["global_step"] - before["global_step"]
        return max(0.0, grown / (now - then)) if now - then > LEAST_S else 0.0

    def speeds(self) -> Speeds | None:
        """Returns the speeds, or None while too little has been seen."""
        now, newest = self._seen[-1]
        then, before = next(seen for seen in self._seen if now - seen[0] <= WINDOW_S)
        passed = now - then
        if passed <= LEAST_S:
            return None
        workers = {}
        for index, w in newest["per_worker"].items():
            was = before["per_worker"].get(index) or {"batches": 0, "waited_s": 0.0}
            waits = min(1.0, max(0.0, (w["waited_s"] - was["waited_s"]) / passed))
            named_at, named = self._named.get(index, (0.0, None))
            workers[index] = WorkerSpeed(
                _rate(w["batches"] - was["batches"], passed), waits, named if now - named_at <= REMEMBER_S else None
            )
        old = before.get("optimizers") or {}
        optimizers = {
            name: _rate(of["version"] - old.get(name, of)["version"], passed)
            for name, of in (newest.get("optimizers") or {}).items()
        }
        updates = _rate(
            newest.get("updates", newest["global_step"]) - before.get("updates", before["global_step"]), passed
        )
        return Speeds(f"last {passed:.0f} s", updates, workers, optimizers)


def _rate(count: float, seconds: float) -> float:
    return max(0.0, count / seconds) if seconds > 0 else 0.0


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
