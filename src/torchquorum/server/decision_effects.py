"""What follows from a decision of the quorum: entries of the log, lines of the ledger and for people, counts.

Owned by the leader, which asks the quorum. What always holds: a released worker is released with its newest request, at the
version that the quorum says; nothing is decided in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchquorum.errors import UpdateError
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.lines import first_of
from torchquorum.rules import quorum
from torchquorum.rules.barriers import Barriers
from torchquorum.rules.equal_gradients import ROUNDS, EqualGradients
from torchquorum.rules.quorum import Quorum
from torchquorum.server.arrivals import Arrival
from torchquorum.server.decision_log import DecisionLog, LogEntry
from torchquorum.server.evictions import Evictions
from torchquorum.server.membership import Membership
from torchquorum.server.recorder import Recorder
from torchquorum.server.run_history import RunHistory
from torchquorum.server.run_settings import RunSettings
from torchquorum.server.shared_data import SharedData
from torchquorum.server.tally import Tally
from torchquorum.wire.messages import ALL, Apply, Drop, Outcome, Plan, ReadOut, Release
from torchquorum.wire.recorded import DIED, PUSH
from torchquorum.wire.settings import Settings


class DecisionEffects:
    """What a run keeps of the decisions of its quorum.

    Attributes:
        log: What every shard follows.
        evictions: When rows of each optimizer's tables go.
        settings: The options of each optimizer's parameter groups.
        scheduled_rates: Returns the rates with which an optimizer's schedule makes a version.
        requests: Of each worker, its incarnation and its newest request.
        about: Of each worker, which track that request is about.
        outcomes: What became of each worker's last gradient, until it asks for something else.
        notes: Lines for people, printed and cleared by the owner.
        recorder: Hears of every decision, where the run is recorded.
    """

    def __init__(
        self,
        plan: Plan,
        quorum: Quorum,
        tally: Tally,
        ledger: LedgerWriter | None,
        settings: Sequence[Settings] | None,
    ) -> None:
        self.plan, self.plans, self.quorum = plan, plan.tracks(), quorum
        self.log = DecisionLog(plan.num_shards)
        self.evictions = [Evictions(of) for of in self.plans]
        self.history = RunHistory(quorum, tally, ledger, plan.names)
        self.scheduled_rates: Callable[[int, int], list[float]] = lambda _track, _version: []
        self.settings = [RunSettings(s) for s in settings or [of.optimizer.groups for of in self.plans]]
        self.membership = Membership(plan, quorum)
        self.data, self.barriers, self._equal = SharedData(), Barriers(), EqualGradients()
        self.requests: dict[int, tuple[int, int]] = {}
        self.about: dict[int, int] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.notes: list[str] = []
        self.recorder: Recorder | None = None
        self.log.record = self._record

    def _record(self, entry: LogEntry) -> None:
        if self.recorder is not None and not isinstance(entry, ReadOut):
            outcome = self.outcomes.get(entry.worker) if isinstance(entry, Release) else None
            self.recorder.entry(entry, outcome)

    def note(self, line: str | None) -> None:
        """Keeps a line for people, if there is one."""
        if line is not None:
            self.notes.append(line)

    def pushes(self, worker: int, incarnation: int, request: int, local_step: int, track: int) -> None:
        """A worker asks what becomes of a gradient of an optimizer."""
        self.requests[worker], self.about[worker] = (incarnation, request), track
        if self.recorder is not None:
            self.recorder.asks(worker, PUSH, local_step)

    def asks(self, worker: int, incarnation: int, request: int, what: str, number: int = 0) -> None:
        """A worker asks for something else than what became of its last gradient."""
        if self.recorder is not None:
            self.recorder.asks(worker, what, number)
        self.requests[worker], self.about[worker] = (incarnation, request), ALL
        self.outcomes.pop(worker, None)

    def release(
        self, worker: int, incarnation: int, request: int, *, averaged: bool = False, state: bool = False
    ) -> None:
        """A worker may go on, with the version that there is."""
        quorum, track = self.quorum, self.about.get(worker, ALL)
        version = quorum.tracks[max(track, 0)].version
        self.log.append(Release(worker, incarnation, request, version, quorum.stopped, averaged, state, track))

    def follow(self, actions: list[quorum.Action], wall: float, push: Arrival | None = None) -> None:
        """Does what follows from what the quorum has decided; `push` is the gradient that it decided on.

        Raises:
            UpdateError: The workers wait for each other, and would for ever.
        """
        counts, track = self.history.tally, push.track if push is not None else 0
        made = next((a.version for a in actions if isinstance(a, quorum.Applied) and a.track == track), None)
        for action in actions:
            match action:
                case quorum.Accepted() | quorum.Refused():
                    rates = self._rates(track, made) if made is not None else []
                    self._decided(action, wall, push or Arrival(), rates)
                case quorum.Applied(keys, version, of):
                    batches = self.data.applied(keys) if self.data else {}
                    self.barriers.applied(keys)
                    named = [(k.worker, k.incarnation, k.local_step) for k in keys]
                    gone_at = self.evictions[of].at(version, wall)
                    self.log.append(Apply(named, version, batches, self.settings[of].take(), gone_at, of))
                    if self.plans[of].rule.once_per_round:
                        self._compare(keys, of, wall)
                    if of == 0:
                        counts.updated(wall)
                case quorum.Released(worker, incarnation, _, version, stop):
                    counts.worker(worker).release(wall)
                    request, of = self.requests[worker][1], self.about[worker]
                    self.log.append(Release(worker, incarnation, request, version, stop, track=of))
                case quorum.Chose():
                    self._chose(action, wall)
                case quorum.Died(worker, incarnation, why):
                    counts.worker(worker).release(wall)
                    self.died(worker, incarnation, why, wall)
                case quorum.Stuck():
                    raise UpdateError(self._explain_stuck(action))
                case _:
                    pass

    def _explain_stuck(self, action: quorum.Stuck) -> str:
        """Returns in words that all workers wait, in rounds of different optimizers, and what to do."""
        names, waits = self.plan.names, list[str]()
        for track, workers in action.waits:
            who = first_of([f"/job:worker/task:{i}" for i in workers], 4)
            of = self.quorum.tracks[track]
            waits.append(f"{who} for the round of {names[track]} ({len(of.round)} of {of.needed} gradients)")
        return (
            f"all live workers wait for each other, in rounds of different optimizers: {'; '.join(waits)}. The run ends. Under "
            "rules with rounds every worker has to step the same optimizers in the same order: start all of them with the same "
            "program, and let nothing that differs between workers, such as its index or its data, decide which optimizer is "
            "stepped; or give one of the optimizers rule=tq.Async()."
        )

    def _rates(self, track: int, version: int) -> list[float]:
        """Returns the learning rates with which a version is about to be made."""
        if self.plans[track].schedule is None:
            return self.settings[track].rates
        return self.scheduled_rates(track, version)

    def _decided(
        self, action: quorum.Accepted | quorum.Refused, wall: float, push: Arrival, rates: list[float]
    ) -> None:
        accepted, key = isinstance(action, quorum.Accepted), action.key
        if action.reason is not quorum.Reason.OLD_INCARNATION:
            self.outcomes[key.worker] = Outcome(accepted, action.reason.value, action.met)
        batches = self.data.decided(key, action.reason, accepted=accepted) if self.data else {}
        self.barriers.decided(key, accepted=accepted)
        if accepted and self.plans[push.track].rule.once_per_round:
            self._equal.given(key, push.sample, push.norm)
        self.history.decided(action, push, wall, batches, rates)
        if self.recorder is not None:
            self.recorder.decided(action, push.loss)
        if action.reason is quorum.Reason.NOT_FINITE:
            self.note(self.history.largest())
        if not accepted:
            self.log.append(Drop([(key.worker, key.incarnation, key.local_step)]))

    def _compare(self, keys: Sequence[quorum.Key], track: int, wall: float) -> None:
        """An update was made; says, once, that workers read the same batches."""
        workers = self._equal.applied(keys, track)
        if workers:
            self.history.wall = wall
            self.history.note("equal gradients", values={"workers": list(workers)})
            who = first_of([f"/job:worker/task:{worker}" for worker in workers], 4)
            of = f" of {self.plan.names[track]}" if self.plan.more else ""
            self.notes.append(
                f"{who} gave equal gradients{of} in {ROUNDS} rounds running: they read the same batches, or draw the same noise, so "
                "all but one compute for nothing. Divide the data: DataLoader(..., sampler=tq.data.Sampler(dataset, task)), "
                "session.share(dataset, batch_size), or what the program reads by task.index and task.num_workers; seed the noise by "
                "torch.manual_seed(seed + task.index)"
            )

    def _chose(self, action: quorum.Chose, wall: float) -> None:
        """The rule waits for another number of gradients: in the ledger, so that the run can be followed."""
        chosen: dict[str, Any] = {"aggregate": action.aggregate, "live": action.live}
        chosen["round_s"], name = round(action.round_s, 6), self.plan.names[action.track]
        chosen |= self.plan.naming(action.track)
        self.history.wall = wall
        self.history.note("chose", values=chosen)
        of = f" of {name}" if name else ""
        self.notes.append(f"an update{of} takes {action.aggregate} gradients of {action.live} workers from now on")

    def died(self, worker: int, incarnation: int, why: str, wall: float) -> None:
        """A worker counts as dead from now on."""
        self.data.gone(worker, incarnation, for_good=False)
        if self.recorder is not None:
            self.recorder.gone(worker, incarnation, DIED, why)
        self.history.wall = wall
        carried = self.history.tally.worker(worker).carried
        self.history.note("died", worker, why, {"lost": carried} if carried else None)
        chief = " (ps task 0 saves in its place)" if worker == 0 and self.plan.logdir else ""
        self.notes.append(f"/job:worker/task:{worker} counts as dead ({why}); the run goes on without it{chief}")
        self.note(self.membership.changed())
