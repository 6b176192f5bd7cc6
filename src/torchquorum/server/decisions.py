"""What follows from a decision of the quorum: entries of the log, lines of the ledger and for people, counts.

Owned by the leader, which asks the quorum. What always holds: a released worker is released with its newest request, at the
version that the quorum says; nothing is decided in here.
"""

from __future__ import annotations

from collections.abc import Callable

from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.rules import quorum
from torchquorum.rules.gates import Gates
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
from torchquorum.wire.messages import Apply, Drop, Outcome, Plan, Release, RowsOut
from torchquorum.wire.recorded import DIED, PUSH
from torchquorum.wire.settings import Settings


class Decisions:
    """What a run keeps of its quorum's decisions.

    Attributes:
        log: What every shard follows.
        evictions: When rows of tables go.
        settings: The options of the optimizer's parameter groups.
        scheduled_rates: Returns the rates with which a schedule makes a version.
        requests: Of each worker, its incarnation and its newest request.
        outcomes: What became of each worker's last gradient, until it asks for something else.
        notes: Lines for people, printed and cleared by the owner.
        recorder: Hears of every decision, where the run is recorded.
    """

    def __init__(
        self, plan: Plan, quorum: Quorum, tally: Tally, ledger: LedgerWriter | None, settings: Settings | None
    ) -> None:
        self.plan, self.quorum = plan, quorum
        self.log = DecisionLog(plan.num_shards)
        self.evictions = Evictions(plan)
        self.history = RunHistory(quorum, tally, ledger)
        self.scheduled_rates: Callable[[int], list[float]] = lambda _version: []
        self.settings = RunSettings(plan.optimizer.groups if settings is None else settings)
        self.membership = Membership(plan, quorum)
        self.data, self.gates = SharedData(), Gates()
        self.requests: dict[int, tuple[int, int]] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.notes: list[str] = []
        self.recorder: Recorder | None = None
        self.log.record = self._record

    def _record(self, entry: LogEntry) -> None:
        if self.recorder is not None and not isinstance(entry, RowsOut):
            outcome = self.outcomes.get(entry.worker) if isinstance(entry, Release) else None
            self.recorder.entry(entry, outcome)

    def note(self, line: str | None) -> None:
        """Keeps a line for people, if there is one."""
        if line is not None:
            self.notes.append(line)

    def pushes(self, worker: int, incarnation: int, request: int, local_step: int) -> None:
        """A worker asks what becomes of a gradient."""
        self.requests[worker] = (incarnation, request)
        if self.recorder is not None:
            self.recorder.asks(worker, PUSH, local_step)

    def asks(self, worker: int, incarnation: int, request: int, what: str, number: int = 0) -> None:
        """A worker asks for something else than what became of its last gradient."""
        if self.recorder is not None:
            self.recorder.asks(worker, what, number)
        self.requests[worker] = (incarnation, request)
        self.outcomes.pop(worker, None)

    def release(
        self, worker: int, incarnation: int, request: int, *, averaged: bool = False, state: bool = False
    ) -> None:
        """A worker may go on, with the version that there is."""
        quorum = self.quorum
        self.log.append(Release(worker, incarnation, request, quorum.version, quorum.stopped, averaged, state))

    def follow(self, actions: list[quorum.Action], wall: float, push: Arrival | None = None) -> None:
        """Does what follows from what the quorum has decided; `push` is the gradient that it decided on."""
        counts = self.history.tally
        made = next((action.version for action in actions if isinstance(action, quorum.Applied)), None)
        for action in actions:
            match action:
                case quorum.Accepted() | quorum.Refused():
                    self._decided(action, wall, push or Arrival(), self._rates(made) if made is not None else [])
                case quorum.Applied(keys, version):
                    batches = self.data.applied(keys) if self.data else {}
                    self.gates.applied(keys)
                    named = [(k.worker, k.incarnation, k.local_step) for k in keys]
                    gone_at = self.evictions.at(version, wall)
                    self.log.append(Apply(named, version, batches, self.settings.take(), gone_at))
                    counts.updated(wall)
                case quorum.Released(worker, incarnation, _, version, stop):
                    counts.worker(worker).release(wall)
                    self.log.append(Release(worker, incarnation, self.requests[worker][1], version, stop))
                case quorum.Chose():
                    self._chose(action, wall)
                case quorum.Died(worker, incarnation, why):
                    counts.worker(worker).release(wall)
                    self.died(worker, incarnation, why, wall)
                case _:
                    pass

    def _rates(self, version: int) -> list[float]:
        """Returns the learning rates with which a version is about to be made."""
        return self.settings.rates if self.plan.schedule is None else self.scheduled_rates(version)

    def _decided(
        self, action: quorum.Accepted | quorum.Refused, wall: float, push: Arrival, rates: list[float]
    ) -> None:
        accepted, key = isinstance(action, quorum.Accepted), action.key
        if action.reason is not quorum.Reason.OLD_INCARNATION:
            self.outcomes[key.worker] = Outcome(accepted, action.reason.value, action.met)
        batches = self.data.decided(key, action.reason, accepted=accepted) if self.data else {}
        self.gates.decided(key, accepted=accepted)
        self.history.decided(action, push.loss, wall, batches, rates, norm=push.norm)
        if self.recorder is not None:
            self.recorder.decided(action, push.loss)
        if action.reason is quorum.Reason.NOT_FINITE:
            self.note(self.history.largest())
        if not accepted:
            self.log.append(Drop([(key.worker, key.incarnation, key.local_step)]))

    def _chose(self, action: quorum.Chose, wall: float) -> None:
        """The rule waits for another number of gradients: in the ledger, so that the run can be followed."""
        chosen = {"aggregate": action.aggregate, "live": action.live, "round_s": round(action.round_s, 6)}
        self.history.wall = wall
        self.history.note("chose", values=chosen)
        self.notes.append(f"an update takes {action.aggregate} gradients of {action.live} workers from now on")

    def died(self, worker: int, incarnation: int, why: str, wall: float) -> None:
        """A worker counts as dead from now on."""
        self.data.gone(worker, incarnation, for_good=False)
        if self.recorder is not None:
            self.recorder.gone(worker, incarnation, DIED, why)
        self.history.wall = wall
        self.history.note("died", worker, why)
        chief = " (ps task 0 saves in its place)" if worker == 0 and self.plan.logdir else ""
        self.notes.append(f"/job:worker/task:{worker} counts as dead ({why}); the run goes on without it{chief}")
        self.note(self.membership.changed())
