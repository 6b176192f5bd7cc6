"""The decisions of shard 0: who is in, which gradients make an update, who may go on. The others follow its log.

Owned by `Leading`. It hears of gradients (from its own shard and, through `Have`, from the others), asks the quorum once a
gradient has arrived everywhere, and appends what follows to the log. It holds no tensors and opens no sockets. What always
holds: every shard that follows the log applies the same gradients in the same order and answers the same requests at the
same version.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchquorum.fastpath.records import GradientRecord
from torchquorum.formats.ledger import name_life
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.rules import quorum
from torchquorum.rules.quorum import Key, Quorum
from torchquorum.server.assignments import Assignments
from torchquorum.server.decision_log import DecisionLog
from torchquorum.server.membership import Membership
from torchquorum.server.run_history import RunHistory
from torchquorum.server.run_settings import RunSettings
from torchquorum.server.shared_data import SharedData
from torchquorum.server.tally import Tally
from torchquorum.wire.messages import (
    STANDS_IN,
    Apply,
    Assign,
    Assigned,
    Drop,
    End,
    Fate,
    Held,
    LeasedBatches,
    Outcome,
    Plan,
    Release,
    Snapshot,
    TakeBatches,
)
from torchquorum.wire.settings import Settings

REMEMBERED_ARRIVALS = 4096


@dataclass(slots=True)
class Arrival:
    """A gradient that has reached some shards; all but `shards` comes with shard 0's own part."""

    version: int | None = None
    loss: float | None = None
    finite: bool = True
    settings: Settings = field(default_factory=list)
    shards: set[int] = field(default_factory=set)


class Arrivals:
    """The gradients that have not reached every shard yet; the oldest are dropped when there are too many."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._open: OrderedDict[Key, Arrival] = OrderedDict()

    def add(self, shard: int, key: Key, push: Arrival | None) -> Arrival | None:
        """Adds a shard's part; returns the arrival once it is complete."""
        arrival = self._open.get(key)
        if arrival is None:
            arrival = self._open[key] = Arrival()
        arrival.shards.add(shard)
        if push is not None:
            arrival.version, arrival.loss, arrival.finite = push.version, push.loss, push.finite
            arrival.settings = push.settings
        while len(self._open) > REMEMBERED_ARRIVALS:
            self._open.popitem(last=False)
        if len(arrival.shards) < self._num_shards or arrival.version is None:
            return None
        del self._open[key]
        return arrival

    def drop(self, key: Key) -> None:
        """Forgets a gradient that will never be complete."""
        self._open.pop(key, None)

    def __repr__(self) -> str:
        return repr(self._open)


class Leader:
    """The quorum, the log and the history of a run.

    Attributes:
        settings: The options of the optimizer's parameter groups.
        scheduled_rates: Returns the rates with which a schedule makes a version.
        outcomes: What became of each worker's last gradient, until it asks for something else.
        notes: Lines for people, printed and cleared by the owner.
    """

    def __init__(
        self,
        plan: Plan,
        tally: Tally,
        ledger: LedgerWriter | None,
        version: int = 0,
        settings: Settings | None = None,
    ) -> None:
        self.quorum = Quorum(
            plan.rule, plan.num_workers, version=version, last_step=plan.last_step, liveness_s=plan.liveness_s
        )
        self.plan = plan
        self.log = DecisionLog(plan.num_shards)
        self.history = RunHistory(self.quorum, tally, ledger)
        self.scheduled_rates: Callable[[int], list[float]] = lambda _version: []
        self.settings = RunSettings(plan.optimizer.groups if settings is None else settings)
        self.membership = Membership(plan, self.quorum)
        self.assignments = Assignments()
        self.data = SharedData()
        self.arrivals = Arrivals(plan.num_shards)
        self.outcomes: dict[int, Outcome] = {}
        self.notes: list[str] = []
        self._requests: dict[int, tuple[int, int]] = {}

    # -- what happens -------------------------------------------------------------------------------------------------

    def begin(self, wall: float) -> None:
        """The variables exist, new or restored."""
        self.history.wall = wall
        self._note(self.membership.begin())
        self.history.begin(self.plan)

    def _note(self, line: str | None) -> None:
        if line is not None:
            self.notes.append(line)

    def join(self, worker: int, incarnation: int, request: int, now: float, wall: float, transport: str) -> None:
        """A worker is ready to compute."""
        if (worker, incarnation) in self.quorum.replaced:
            return
        self._requests[worker] = (incarnation, request)
        known = self.quorum.workers.get(worker)
        counts = self.history.tally.worker(worker)
        counts.transport = transport
        counts.joined_at = wall if counts.joined_at is None else counts.joined_at
        if known is None or known.incarnation != incarnation:
            how = "joined" if known is None else "came back"
            self.notes.append(f"/job:worker/task:{worker} {how}")
            self.history.wall = wall
            self.history.note(how, worker)
            self.assignments.forget(worker)
            if known is not None:
                self._drop_incomplete(Key(worker, known.incarnation, known.local_step + 1))
                self.data.gone(worker, known.incarnation, for_good=True)
        self.outcomes.pop(worker, None)
        self._follow(self.quorum.join(worker, incarnation, now), wall)
        self._note(self.membership.changed())

    def _drop_incomplete(self, key: Key) -> None:
        """A worker's incarnation is over: a gradient of it that reached only some shards will never be complete."""
        if self.plan.num_shards > 1:
            self.arrivals.drop(key)
            self.log.append(Drop([(key.worker, key.incarnation, key.local_step)]))

    def pull(self, worker: int, incarnation: int, request: int, *, averaged: bool = False, state: bool = False) -> None:
        """A joined worker asks for the current version, outside of a push."""
        self._requests[worker] = (incarnation, request)
        self.outcomes.pop(worker, None)
        stopped = self.quorum.stopped
        self.log.append(Release(worker, incarnation, request, self.quorum.version, stopped, averaged, state))

    def assign(self, assign: Assign, wall: float) -> None:
        """A joined worker has come to an assignment, with its values or without."""
        assignments, quorum = self.assignments, self.quorum
        self._requests[assign.worker] = (assign.incarnation, assign.request)
        self.outcomes.pop(assign.worker, None)
        assignments.wait(assign)
        if not quorum.stopped and assignments.is_due(assign, quorum):
            assignments.make(assign)
            if assign.variables:
                self._assign(assign, wall)
        self._release_assigned()

    def _assign(self, assign: Assign, wall: float) -> None:
        """Given values become the next version."""
        met, names = self.quorum.version, [self.plan.variables[v].name for v in assign.variables]
        actions = self.quorum.assign()
        version = self.quorum.version
        self.log.append(Assigned(assign.worker, assign.incarnation, assign.number, version, assign.variables))
        self._follow(actions, wall)
        lost = met - assign.version
        since = f"; in these, {lost} updates since version {assign.version} are overwritten" if lost else ""
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        text = f"{shown} became version {version}{since}"
        self.history.wall = wall
        self.history.note("assigned", assign.worker, text)
        self.notes.append(f"/job:worker/task:{assign.worker} assigned values: {text}")

    def _release_assigned(self) -> None:
        """Releases the workers whose wait for an assignment is over; one whose values count now is asked for them."""
        asked = self.assignments.stand_in(self.quorum) if not self.quorum.stopped else None
        if asked is not None:
            self.outcomes[asked.worker] = Outcome(False, STANDS_IN, self.quorum.version)
        over = self.assignments.over(stopped=self.quorum.stopped)
        for assign in over if asked is None else [*over, asked]:
            version, stopped = self.quorum.version, self.quorum.stopped
            self.log.append(Release(assign.worker, assign.incarnation, assign.request, version, stopped))

    @property
    def awaits_assignment(self) -> bool:
        """Whether a worker waits for an assignment."""
        return bool(self.assignments.waiting)

    def arrived(
        self, shard: int, key: Key, request: int, now: float, wall: float, *, push: Arrival | None = None
    ) -> None:
        """A shard holds its part of a gradient; `push` comes with shard 0's own part."""
        known = self.quorum.workers.get(key.worker)
        current = known is not None and known.incarnation == key.incarnation
        if known is not None and current and key.local_step <= known.local_step:
            if push is not None:
                self.asked_again(key, request)
            return  # it has been decided on: its worker has its answer, or waits for it
        arrival = self.arrivals.add(shard, key, push)
        if push is not None and current:
            self._requests[key.worker] = (key.incarnation, request)
        if arrival is None:
            return
        # The gradient is on every shard: the quorum decides.
        assert arrival.version is not None
        self.outcomes.pop(key.worker, None)
        self.history.tally.worker(key.worker).hold(wall)
        if arrival.settings and key.worker == self.lead and current:
            self.settings.offer(arrival.settings)
        if self.data and not self.data.counts(key):
            self.quorum.fence(key.worker, key.incarnation)
        self._follow(self.quorum.push(key, arrival.version, now, finite=arrival.finite), wall, arrival.loss)

    def arrived_by_fastpath(self, record: GradientRecord) -> None:
        """A worker has applied a gradient itself, or given it to a round of the fast path."""
        if record.rates:
            self.settings.offer_rates(record.rates)
        push = Arrival(record.computed_at, record.loss)
        self.arrived(0, record.key, record.request, record.now, record.wall, push=push)

    def refuses_next(self, worker: int) -> bool:
        """Whether the next gradient of a live worker will be refused."""
        known = self.quorum.workers[worker]
        return known.fenced or bool(self.data and self.data.is_void(worker, known.incarnation, known.local_step))

    def asked_again(self, key: Key, request: int) -> None:
        """A gradient that was decided on is pushed again, under a later request: its worker had lost the connection.

        It is answered under that request: when its wait is over, or now.
        """
        known = self.quorum.workers.get(key.worker)
        if (
            known is None
            or known.incarnation != key.incarnation
            or request <= self._requests.get(key.worker, (0, 0))[1]
        ):
            return
        self._requests[key.worker] = (key.incarnation, request)
        if not known.held:
            self.log.append(Release(key.worker, key.incarnation, request, self.quorum.version, self.quorum.stopped))

    def leave(self, worker: int, incarnation: int, wall: float, *, failed: str = "") -> None:
        """A worker leaves for good; with `failed`, because its program failed."""
        known = self.quorum.workers.get(worker)
        if known is None or known.incarnation != incarnation:
            return
        counts = self.history.tally.worker(worker)
        counts.release(wall)
        self.history.wall = wall
        if not known.left and not failed:
            results = {"loss": counts.final_loss, "accuracy": counts.accuracy}
            values = {name: value for name, value in results.items() if value is not None}
            self.history.note("left", worker, values=values)
        self.data.gone(worker, incarnation, for_good=True)
        self.assignments.forget(worker)
        self._follow(self.quorum.leave(worker, incarnation, failed=failed), wall)
        self._release_assigned()
        if not self.data.over:
            self._note(self.membership.changed())
        if worker == 0 and not failed and self.plan.logdir and self.quorum.alive and not self.quorum.stopped:
            self.notes.append("/job:worker/task:0 is done; the others go on (ps task 0 saves in its place)")

    def take_batches(self, take: TakeBatches, now: float, wall: float) -> LeasedBatches:
        """A joined worker asks for its share of the data."""
        answer = self.data.take(take, self.quorum.live, stopped=self.quorum.stopped)
        self.notes += self.data.notes
        self.data.notes.clear()
        if answer.numbers:
            self._follow(self.quorum.resume(take.worker, take.incarnation, now), wall)
        return answer

    def pause(self, worker: int, incarnation: int, now: float, wall: float) -> None:
        """A worker has nothing to compute, because others have what is left of the data: rounds do not wait for it meanwhile."""
        self._follow(self.quorum.pause(worker, incarnation, now), wall)

    def lost(self, worker: int, incarnation: int, why: str, wall: float) -> None:
        """A worker's process is gone."""
        self._follow(self.quorum.lost(worker, incarnation, why), wall)
        self._release_assigned()

    def tick(self, now: float, wall: float) -> None:
        """Time has passed."""
        self.history.wall = wall
        self._follow(self.quorum.expire(now), wall)
        if self.awaits_assignment:
            self._release_assigned()

    def stop(self, wall: float) -> None:
        """The run is over now."""
        self._follow(self.quorum.stop(), wall)
        self._release_assigned()

    def snapshot(self, number: int, partial: str) -> None:
        """Every shard writes itself, as it is now."""
        self.log.append(Snapshot(number, self.quorum.version, partial))

    def end(self, *, ok: bool, why: str) -> None:
        """The job is over: every shard exits when it comes to this entry."""
        for action in self.quorum.close():
            if isinstance(action, quorum.Discarded):
                self.notes.append(
                    f"{len(action.keys)} accepted gradients were not used: the run ended before their round closed"
                )
        self.history.note("ended", text="" if ok else why)
        self.log.append(End(ok, why))

    # -- what is asked ------------------------------------------------------------------------------------------------

    @property
    def lead(self) -> int:
        """Returns the worker that does the chief's work: the chief, or the first one alive while the chief is gone."""
        chief = self.quorum.workers.get(0)
        alive = self.quorum.alive
        return min(alive) if chief is not None and chief.gone and alive else 0

    @property
    def changes_settings(self) -> bool:
        """Whether the next update has other settings than the last: the gradient that brought them was refused."""
        return self.settings.pending

    def wait_of(self, worker: int, incarnation: int, request: int) -> Held | None:
        """Returns what a worker's request waits for, if it is known and waits."""
        if self._requests.get(worker) != (incarnation, request):
            return None
        if worker in self.assignments.waiting:
            who = self.assignments.assigner(self.quorum)
            return Held(request, f"/job:worker/task:{who} to assign values", 0, 1, [who])
        wait = self.quorum.waits_for(worker)
        return Held(request, wait.what, wait.have, wait.need, list(wait.missing)) if wait else None

    def fate(self, key: Key) -> Fate:
        """Returns what became of a gradient; never, if it was not decided on and its worker can no longer push it."""
        known = self.quorum.workers.get(key.worker)
        gone = known is None or known.incarnation != key.incarnation or known.left or not known.alive
        return self.history.fate(key) or Fate(*key, "never" if gone else "open")

    def status(self) -> dict[str, Any]:
        """Returns the state of the run for people and reports."""
        quorum, counts = self.quorum, self.history.tally
        for index, worker in quorum.workers.items():
            wait = quorum.waits_for(index)
            of = counts.worker(index)
            of.state = "dead" if worker.gone else "left" if worker.left else "waiting" if wait else "computing"
            of.waits_for = wait.to_dict() if wait and worker.alive else None
        transports = sorted({w.transport for w in counts.workers.values() if w.transport})
        return {
            "rule": str(self.plan.rule),
            "global_step": quorum.version,
            "last_step": quorum.last_step,
            "live": quorum.alive,
            "heard": {str(i): [w.last_seen, name_life(w.incarnation)] for i, w in quorum.workers.items() if w.alive},
            "stopped": quorum.stopped,
            "transport": "+".join(transports),
            **({"aggregate": quorum.needed} if quorum.rule.auto else {}),
            **self.membership.status(),
            **({"data": self.data.status()} if self.data else {}),
            **counts.snapshot(),
        }

    # -- what follows from a decision ---------------------------------------------------------------------------------

    def _follow(self, actions: list[quorum.Action], wall: float, loss: float | None = None) -> None:
        counts = self.history.tally
        made = next((action.version for action in actions if isinstance(action, quorum.Applied)), None)
        for action in actions:
            match action:
                case quorum.Accepted() | quorum.Refused():
                    self._decided(action, wall, loss, self._rates(made) if made is not None else [])
                case quorum.Applied(keys, version):
                    batches = self.data.applied(keys) if self.data else {}
                    named = [(k.worker, k.incarnation, k.local_step) for k in keys]
                    self.log.append(Apply(named, version, batches, self.settings.take()))
                    counts.updated(wall)
                case quorum.Released(worker, incarnation, _, version, stop):
                    counts.worker(worker).release(wall)
                    self.log.append(Release(worker, incarnation, self._requests[worker][1], version, stop))
                case quorum.Chose():
                    self._chose(action, wall)
                case quorum.Died(worker, incarnation, why):
                    counts.worker(worker).release(wall)
                    self._died(worker, incarnation, why, wall)
                case _:
                    pass

    def _rates(self, version: int) -> list[float]:
        """Returns the learning rates with which a version is about to be made."""
        return self.settings.rates if self.plan.schedule is None else self.scheduled_rates(version)

    def _decided(
        self, action: quorum.Accepted | quorum.Refused, wall: float, loss: float | None, rates: list[float]
    ) -> None:
        accepted, key = isinstance(action, quorum.Accepted), action.key
        if action.reason is not quorum.Reason.OLD_INCARNATION:
            self.outcomes[key.worker] = Outcome(accepted, action.reason.value, action.met)
        batches = self.data.decided(key, action.reason, accepted=accepted) if self.data else {}
        self.history.decided(action, loss, wall, batches, rates)
        if not accepted:
            self.log.append(Drop([(key.worker, key.incarnation, key.local_step)]))

    def _chose(self, action: quorum.Chose, wall: float) -> None:
        """The rule waits for another number of gradients: in the ledger, so that the run can be followed."""
        chosen = {"aggregate": action.aggregate, "live": action.live, "round_s": round(action.round_s, 6)}
        self.history.wall = wall
        self.history.note("chose", values=chosen)
        self.notes.append(f"an update takes {action.aggregate} gradients of {action.live} workers from now on")

    def _died(self, worker: int, incarnation: int, why: str, wall: float) -> None:
        self.data.gone(worker, incarnation, for_good=False)
        self.history.wall = wall
        self.history.note("died", worker, why)
        chief = " (ps task 0 saves in its place)" if worker == 0 and self.plan.logdir else ""
        self.notes.append(f"/job:worker/task:{worker} counts as dead ({why}); the run goes on without it{chief}")
        self._note(self.membership.changed())
