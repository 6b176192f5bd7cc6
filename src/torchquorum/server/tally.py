"""What happened in a run, counted: the source of status, report and the live view.

Owned by the leader. `snapshot` is JSON-able. Times are seconds since the epoch where they say `_at`, durations `_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchquorum.wire.worker_messages import Contribution


@dataclass(slots=True)
class GradientTally:
    """The counts of gradients that were decided on."""

    batches: int = 0
    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    staleness_sum: int = 0
    staleness_max: int = 0
    loss: float | None = None

    def count(self, *, accepted: bool, reason: str, staleness: int, loss: float | None) -> None:
        """Counts one gradient."""
        self.batches += 1
        self.loss = loss if loss is not None else self.loss
        if accepted:
            self.accepted += 1
            self.staleness_sum += staleness
            self.staleness_max = max(self.staleness_max, staleness)
        else:
            self.refused[reason] = self.refused.get(reason, 0) + 1

    def counts(self) -> dict[str, Any]:
        """Returns the counts in the words of the report."""
        return {
            "batches": self.batches,
            "loss": self.loss,
            "refused": sum(self.refused.values()),
            "refused_reasons": dict(self.refused),
            "staleness_mean": round(self.staleness_sum / self.accepted, 4) if self.accepted else 0.0,
            "staleness_max": self.staleness_max,
        }


@dataclass(slots=True)
class WorkerTally(GradientTally):
    """The counts of one worker, over all its incarnations."""

    final_loss: float | None = None
    accuracy: float | None = None
    transport: str = ""
    first_at: float | None = None
    last_at: float | None = None
    joined_at: float | None = None
    waited_s: float = 0.0
    held_since: float | None = None
    released_at: float | None = None
    state: str = "unknown"
    waits_for: dict[str, Any] | None = None
    inner_step: int = -1
    carried_over: int = 0
    lost: int = 0
    paces: dict[int, float] = field(default_factory=dict)
    _carried: dict[int, int] = field(default_factory=dict)

    def gave(self, track: int, of: Contribution | None, *, accepted: bool, kept: bool) -> int:
        """It has given what its local steps have changed; returns how many refused ones that holds, if it is accepted.

        A refused one is part of the next that it gives, of the same optimizer, unless it is not `kept`.
        """
        if of is None or of.inner_step < 0:
            return 0
        self.inner_step = max(of.inner_step, self.inner_step)
        if 0 < of.pace_s < float("inf"):
            self.paces[track] = of.pace_s
        if accepted:
            return self._carried.pop(track, 0)
        if kept:
            self.carried_over += 1
            self._carried[track] = self._carried.get(track, 0) + 1
        return 0

    @property
    def carried(self) -> int:
        """Returns how many refused ones it has still to give."""
        return sum(self._carried.values())

    def begin_anew(self) -> int:
        """Another process is this worker now: what the one before had still to give is lost; returns how many."""
        lost = self.carried
        self.lost += lost
        self._carried.clear()
        self.paces.clear()
        self.inner_step = -1
        return lost

    def decided(self, *, accepted: bool, reason: str, staleness: int, loss: float | None, at: float) -> None:
        """Counts one gradient that was decided on at this time."""
        self.count(accepted=accepted, reason=reason, staleness=staleness, loss=loss)
        self.first_at = at if self.first_at is None else self.first_at
        self.last_at = at

    def hold(self, at: float) -> None:
        """The worker begins to wait."""
        self.held_since = at

    def release(self, at: float) -> None:
        """The worker goes on."""
        self.released_at = at
        if self.held_since is not None:
            self.waited_s += at - self.held_since
            self.held_since = None

    def snapshot(self) -> dict[str, Any]:
        """Returns the counts in the words of the report."""
        start = self.joined_at if self.joined_at is not None else self.first_at
        seconds = (self.last_at - start) if self.last_at is not None and start is not None else 0.0
        return {
            **self.counts(),
            "state": self.state,
            "waits_for": self.waits_for,
            "transport": self.transport,
            "updates": self.accepted,
            "seconds": round(seconds, 3),
            "batches_per_s": round(self.batches / seconds, 2) if seconds > 0 else 0.0,
            "loss": self.final_loss if self.final_loss is not None else self.loss,
            "accuracy": self.accuracy,
            "waited_s": round(self.waited_s, 3),
            "start_up_s": None,
            **self._local(),
        }

    def _local(self) -> dict[str, Any]:
        if self.inner_step < 0:
            return {}
        gone = self.carried if self.state == "dead" else 0
        return {
            "inner_step": self.inner_step,
            "carried_over": self.carried_over,
            "to_give": self.carried - gone,
            "lost": self.lost + gone,
        }


@dataclass(slots=True)
class Tally:
    """The counts of the whole run; of several optimizers, also those of each by its name."""

    started_at: float
    workers: dict[int, WorkerTally] = field(default_factory=dict)
    optimizers: dict[str, GradientTally] = field(default_factory=dict)
    first_update_at: float | None = None
    last_update_at: float | None = None
    updates: int = 0

    def worker(self, index: int) -> WorkerTally:
        """Returns the counts of a worker, which begin with its first mention."""
        found = self.workers.get(index)
        if found is None:
            found = self.workers[index] = WorkerTally()
        return found

    def optimizer(self, name: str) -> GradientTally:
        """Returns the counts of one of several optimizers, which begin with its first mention."""
        return self.optimizers.setdefault(name, GradientTally())

    def updated(self, at: float) -> None:
        """Counts one update."""
        self.updates += 1
        self.first_update_at = at if self.first_update_at is None else self.first_update_at
        self.last_update_at = at

    def snapshot(self) -> dict[str, Any]:
        """Returns the totals and the same per worker."""
        workers = {str(i): w.snapshot() for i, w in sorted(self.workers.items())}
        for index, w in self.workers.items():
            if w.first_at is not None:
                workers[str(index)]["start_up_s"] = round(w.first_at - self.started_at, 3)
        tallies = self.workers.values()
        accepted = sum(w.accepted for w in tallies)
        joined = [w.joined_at for w in tallies if w.joined_at is not None]
        seconds = self.last_update_at - min(joined) if joined and self.last_update_at is not None else 0.0
        batches = sum(w.batches for w in tallies)
        first = self.workers.get(0)
        return {
            "updates": self.updates,
            "batches": batches,
            "seconds": round(seconds, 3),
            "batches_per_s": round(batches / seconds, 2) if seconds > 0 else 0.0,
            "loss": workers["0"]["loss"] if first else None,
            "accuracy": first.accuracy if first else None,
            "refused": sum(sum(w.refused.values()) for w in tallies),
            "staleness_mean": round(sum(w.staleness_sum for w in tallies) / accepted, 4) if accepted else 0.0,
            "staleness_max": max((w.staleness_max for w in tallies), default=0),
            "start_up_s": round(self.first_update_at - self.started_at, 3)
            if self.first_update_at is not None
            else None,
            "per_worker": workers,
        }
