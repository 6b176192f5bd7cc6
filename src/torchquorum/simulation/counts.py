"""What has happened in a simulation, counted as it happens, and its figures.

Owned by the simulator; `Simulated` is what `tq.simulate` returns. What always holds: a worker's time is computing, sending, waiting
with a cause, or not being there; the figures come from what happened, never from the scenario.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torchquorum.rules.quorum import Accepted, Action, Applied, Chose, Refused
from torchquorum.simulation.scenario import Scenario


class Counts:
    """The counts of one simulation.

    Attributes:
        scenario: What is simulated.
        seconds: The virtual time at the end.
        update_times: When each update was made.
        sizes: How many gradients each update was made of.
        chosen: Where the rule chooses how many to wait for: (second, version, number).
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.seconds = 0.0
        self.gradients = self.used = self.failures = 0
        self.refused: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.waited: dict[str, float] = {}  # seconds by cause
        self.computing_s = self.sending_s = self.present_s = 0.0
        self.update_times, self.sizes = array("d"), array("q")
        self.chosen: list[tuple[float, int, int]] = []
        # The k-th arrival of a round: seconds since the round began, summed, and how many rounds had one.
        self.arrival_sums, self.arrival_counts = array("d"), array("q")
        self._in_round, self._round_began = 0, 0.0
        count = scenario.workers
        self._held: list[float | None] = [None] * count
        self._cause = [""] * count
        self._since: list[float | None] = [None] * count
        self._busy_until = [0.0] * count

    # -- workers ------------------------------------------------------------------------------------------------------

    def starts(self, worker: int, now: float) -> None:
        """A worker is there."""
        self._since[worker], self._held[worker] = now, None

    def fails(self, worker: int, now: float) -> None:
        """A worker is not there any more; a step that it had begun ends here."""
        self.failures += 1
        self._leaves(worker, now)

    def _leaves(self, worker: int, now: float) -> None:
        since = self._since[worker]
        if since is None:
            return
        self._since[worker] = None
        self.present_s += now - since
        self.computing_s -= max(0.0, self._busy_until[worker] - now)
        self.releases(worker, now)

    def computing(self, worker: int, begin: float, end: float) -> None:
        """A worker computes a gradient."""
        self.computing_s += end - begin
        self._busy_until[worker] = end

    def sending(self, seconds: float) -> None:
        """Bytes of a worker are on their way."""
        self.sending_s += seconds

    def holds(self, worker: int, now: float, cause: str) -> None:
        """A worker begins to wait."""
        self._held[worker], self._cause[worker] = now, cause

    def releases(self, worker: int, now: float) -> None:
        """A worker's wait is over, if it waited."""
        held = self._held[worker]
        if held is not None:
            cause = self._cause[worker]
            self.waited[cause] = self.waited.get(cause, 0.0) + now - held
            self._held[worker] = None

    # -- decisions ----------------------------------------------------------------------------------------------------

    def note(self, action: Action, now: float) -> None:
        """Counts a decision of the quorum."""
        if type(action) is Accepted:
            self.gradients += 1
            self.staleness[action.met - action.version] += 1
            place = self._in_round
            if place == len(self.arrival_sums):
                self.arrival_sums.append(0.0)
                self.arrival_counts.append(0)
            self.arrival_sums[place] += now - self._round_began
            self.arrival_counts[place] += 1
            self._in_round = place + 1
        elif type(action) is Refused:
            self.gradients += 1
            self.refused[action.reason.value] += 1
        elif type(action) is Applied:
            self.used += len(action.keys)
            self.update_times.append(now)
            self.sizes.append(len(action.keys))
            self._in_round, self._round_began = 0, now
        elif type(action) is Chose:
            self.chosen.append((now, len(self.update_times), action.aggregate))

    def close(self, now: float) -> None:
        """The simulation is over."""
        self.seconds = now
        for worker in range(self.scenario.workers):
            self._leaves(worker, now)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The figures of a simulation.

    Attributes:
        rule: The rule, in words.
        workers: How many workers there were, at most.
        seconds: The virtual time.
        updates: How many updates were made.
        gradients: How many gradients arrived.
        used: How many of them became part of an update.
        refused: Refused gradients, by reason.
        staleness_mean: Of accepted gradients.
        staleness_max: Of accepted gradients.
        staleness: Accepted gradients by staleness.
        updates_per_s: Updates per second.
        gradients_per_s: Gradients per second, refused ones included.
        examples_per_s: Examples per second that became part of an update.
        progress_per_s: Updates per second, each counted by what it is worth: the number of its gradients k, or, where the
            scenario has a `noise`, k / (k + noise). The rule with the most progress needs the least time to the same loss, by
            the method of Chen et al. 2016 (time of an update times updates needed).
        computing: The share of the workers' time that they computed.
        sending: The share in which their bytes were on the way; pipelined, they compute meanwhile.
        waiting: The share in which they waited, by cause.
        failures: How many workers failed.
        arrivals_s: Mean seconds from the beginning of a round to its first, second, ... gradient that counts.
        aggregate_mean: The mean number of gradients of an update.
        chosen: Where the rule chooses how many to wait for: (second, version, number), one for each change.
    """

    rule: str
    workers: int
    seconds: float
    updates: int
    gradients: int
    used: int
    refused: dict[str, int]
    staleness_mean: float
    staleness_max: int
    staleness: dict[int, int]
    updates_per_s: float
    gradients_per_s: float
    examples_per_s: float
    progress_per_s: float
    computing: float
    sending: float
    waiting: dict[str, float]
    failures: int
    arrivals_s: list[float]
    aggregate_mean: float
    chosen: list[tuple[float, int, int]]

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures for JSON, without the long lists."""
        left_out = ("arrivals_s", "staleness")
        return {n: getattr(self, n) for n in self.__dataclass_fields__ if n not in left_out}


def figures_of(counts: Counts) -> Simulated:
    """Returns the figures of a simulation that is over."""
    s, seconds = counts.scenario, counts.seconds
    accepted = sum(counts.staleness.values())
    # The time to the last update: what follows it made none.
    until = counts.update_times[-1] if counts.update_times else seconds
    worth = sum(k if s.noise is None else k / (k + s.noise) for k in counts.sizes)
    present = counts.present_s or 1.0
    return Simulated(
        rule=str(s.chosen_rule),
        workers=s.workers,
        seconds=seconds,
        updates=len(counts.update_times),
        gradients=counts.gradients,
        used=counts.used,
        refused=dict(counts.refused),
        staleness_mean=sum(k * n for k, n in counts.staleness.items()) / accepted if accepted else 0.0,
        staleness_max=max(counts.staleness, default=0),
        staleness=dict(sorted(counts.staleness.items())),
        updates_per_s=len(counts.update_times) / until if until > 0 else 0.0,
        gradients_per_s=counts.gradients / seconds if seconds > 0 else 0.0,
        examples_per_s=counts.used * s.batch_size / until if until > 0 else 0.0,
        progress_per_s=worth / until if until > 0 else 0.0,
        computing=counts.computing_s / present,
        sending=counts.sending_s / present,
        waiting={cause: seconds / present for cause, seconds in sorted(counts.waited.items())},
        failures=counts.failures,
        arrivals_s=[total / n for total, n in zip(counts.arrival_sums, counts.arrival_counts, strict=True)],
        aggregate_mean=counts.used / len(counts.sizes) if counts.sizes else 0.0,
        chosen=list(counts.chosen),
    )
