"""The decisions of shard 0: who is in, which gradients make an update, who may go on. The others follow its log.

Owned by the ps thread of task 0. It hears of gradients (from its own shard and, through `Have`, from the others), asks the
quorum once a gradient has arrived everywhere, and appends what follows to the log. It holds no tensors and opens no
sockets. What always holds: every shard that follows the log applies the same gradients in the same order and answers
the same requests at the same version.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchquorum.formats.journal import Record
from torchquorum.formats.ledger import Entry, Event, LedgerWriter, name_life
from torchquorum.rules import quorum
from torchquorum.rules.quorum import Key, Quorum
from torchquorum.server.attendance import Attendance
from torchquorum.server.shared_data import SharedData
from torchquorum.server.tally import Tally
from torchquorum.transport.messages import (
    Apply,
    Batches,
    Drop,
    End,
    Fate,
    Held,
    Outcome,
    Plan,
    Release,
    Snapshot,
    TakeBatches,
)

LogEntry = Apply | Drop | Release | Snapshot | End
REMEMBERED_ARRIVALS = 4096
REMEMBERED_FATES = 4096


@dataclass(slots=True)
class Arrival:
    """A gradient on its way to completeness: which shards hold their part."""

    version: int | None = None
    loss: float | None = None
    finite: bool = True
    shards: set[int] = field(default_factory=set)


class Leader:
    """The quorum, the log and the books."""

    def __init__(self, plan: Plan, tally: Tally, ledger: LedgerWriter | None, version: int = 0) -> None:
        self.quorum = Quorum(
            plan.rule, plan.num_workers, version=version, last_step=plan.last_step, liveness_s=plan.liveness_s
        )
        self.plan, self.tally, self._ledger = plan, tally, ledger
        self.log: list[LogEntry] = []
        self.log_start = 0
        self.notes: list[str] = []
        self._followed: dict[int, int] = {}
        self._arrivals: OrderedDict[Key, Arrival] = OrderedDict()
        self._requests: dict[int, tuple[int, int]] = {}
        self._wall = 0.0
        self.outcomes: dict[int, Outcome] = {}
        self._fates: OrderedDict[Key, Fate] = OrderedDict()
        self.data = SharedData()
        self.attendance = Attendance(plan, self.quorum)

    # -- what happens -------------------------------------------------------------------------------------------------

    def begin(self, wall: float) -> None:
        """The variables exist, new or restored: the ledger says what the run is."""
        self._wall = wall
        self._say(self.attendance.begin())
        if self._ledger is not None:
            plan: dict[str, Any] = msgspec.to_builtins(self.plan)
            values = sum(math.prod(v.shape) for v in self.plan.variables)
            config = {name: value for name, value in plan.items() if name not in ("variables", "rule", "logdir")}
            config |= {"rule": str(self.plan.rule), "variables": len(self.plan.variables), "values": values}
            self.note("began", values=config)
            self._ledger.flush()

    def remember(self, applied: list[Record]) -> None:
        """The journal's updates were made again: whoever asks after one of their gradients hears that it was accepted."""
        for record in applied[-REMEMBERED_FATES:]:
            for key in record.keys:
                self._keep_fate(Fate(*key, "accepted", quorum.Reason.WITHIN_BOUND.value, record.version - 1))

    def _say(self, line: str | None) -> None:
        if line is not None:
            self.notes.append(line)

    def _keep_fate(self, fate: Fate) -> None:
        self._fates[Key(fate.worker, fate.incarnation, fate.local_step)] = fate
        while len(self._fates) > REMEMBERED_FATES:
            self._fates.popitem(last=False)

    def note(self, event: str, worker: int = -1, text: str = "", values: dict[str, Any] | None = None) -> None:
        """Puts into the ledger what is no gradient."""
        if self._ledger is not None:
            self._ledger.write(Event(event, self._wall, self.quorum.version, worker, text, values or {}))

    def flush(self) -> None:
        """Hands what the ledger has to the operating system."""
        if self._ledger is not None:
            self._ledger.flush()

    def join(self, worker: int, incarnation: int, request: int, now: float, wall: float, transport: str) -> None:
        """A worker is ready to compute."""
        if (worker, incarnation) in self.quorum.replaced:
            return
        self._requests[worker] = (incarnation, request)
        known = self.quorum.workers.get(worker)
        tally = self.tally.worker(worker)
        tally.transport = transport
        tally.joined_at = wall if tally.joined_at is None else tally.joined_at
        if known is None or known.incarnation != incarnation:
            how = "joined" if known is None else "came back"
            self.notes.append(f"/job:worker/task:{worker} {how}")
            self._wall = wall
            self.note(how, worker)
            if known is not None:
                self._drop_half(Key(worker, known.incarnation, known.local_step + 1))
                self.data.gone(worker, known.incarnation, for_good=True)
        self.outcomes.pop(worker, None)
        self._follow(self.quorum.join(worker, incarnation, now), wall)
        self._say(self.attendance.changed())

    def _drop_half(self, key: Key) -> None:
        """The life of a worker is over: a gradient of it that reached some shards only will never be whole."""
        if self.plan.num_shards > 1:
            self._arrivals.pop(key, None)
            self._append(Drop([(key.worker, key.incarnation, key.local_step)]))

    def pull(self, worker: int, incarnation: int, request: int, *, averaged: bool = False) -> bool:
        """A worker asks for the current version, outside of a push. False if it is not one of ours."""
        known = self.quorum.workers.get(worker)
        if known is None or known.incarnation != incarnation:
            return False
        self._requests[worker] = (incarnation, request)
        self.outcomes.pop(worker, None)
        self._append(Release(worker, incarnation, request, self.quorum.version, self.quorum.stopped, averaged))
        return True

    def arrived(
        self, shard: int, key: Key, request: int, now: float, wall: float, *, push: Arrival | None = None
    ) -> None:
        """A shard holds its part of a gradient; `push` comes with our own part and says what it was computed at."""
        known = self.quorum.workers.get(key.worker)
        if known is not None and known.incarnation == key.incarnation and key.local_step <= known.local_step:
            if push is not None:
                self.asked_again(key, request)
            return  # it has been decided on: what its worker was told, or waits for, stands
        arrival = self._arrivals.get(key)
        if arrival is None:
            arrival = self._arrivals[key] = Arrival()
        arrival.shards.add(shard)
        if push is not None:
            arrival.version, arrival.loss, arrival.finite = push.version, push.loss, push.finite
            if known is not None and known.incarnation == key.incarnation:
                self._requests[key.worker] = (key.incarnation, request)
        while len(self._arrivals) > REMEMBERED_ARRIVALS:
            self._arrivals.popitem(last=False)
        if len(arrival.shards) < self.plan.num_shards or arrival.version is None:
            return
        del self._arrivals[key]
        self.outcomes.pop(key.worker, None)
        self.tally.worker(key.worker).hold(wall)
        if self.data and not self.data.counts(key):
            self.quorum.fence(key.worker, key.incarnation)
        self._follow(self.quorum.push(key, arrival.version, now, finite=arrival.finite), wall, arrival.loss)

    def asked_again(self, key: Key, request: int) -> None:
        """A gradient that was decided on comes once more, under a later request: its worker had lost the connection.

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
            self._append(Release(key.worker, key.incarnation, request, self.quorum.version, self.quorum.stopped))

    def leave(self, worker: int, incarnation: int, wall: float) -> None:
        """A worker goes for good."""
        known = self.quorum.workers.get(worker)
        if known is None or known.incarnation != incarnation:
            return
        tally = self.tally.worker(worker)
        tally.release(wall)
        self._wall = wall
        if not known.left:
            results = {"loss": tally.final_loss, "accuracy": tally.accuracy}
            self.note("left", worker, values={name: value for name, value in results.items() if value is not None})
        self.data.gone(worker, incarnation, for_good=True)
        self._follow(self.quorum.leave(worker, incarnation), wall)
        if not self.data.over:
            self._say(self.attendance.changed())

    def take_batches(self, take: TakeBatches, now: float, wall: float) -> Batches:
        """A worker that is one of ours asks for its share of the data."""
        answer = self.data.take(take, self.quorum.live, stopped=self.quorum.stopped)
        self.notes += self.data.notes
        self.data.notes.clear()
        if answer.numbers:
            self._follow(self.quorum.resume(take.worker, take.incarnation, now), wall)
        return answer

    def pause(self, worker: int, incarnation: int, now: float, wall: float) -> None:
        """A worker has nothing to compute, because others have what is left of the data: it is not waited for meanwhile."""
        self._follow(self.quorum.pause(worker, incarnation, now), wall)

    def lost(self, worker: int, incarnation: int, why: str, wall: float) -> None:
        """A worker's process is gone."""
        self._follow(self.quorum.lost(worker, incarnation, why), wall)

    def tick(self, now: float, wall: float) -> None:
        """Time has passed."""
        self._wall = wall
        self._follow(self.quorum.expire(now), wall)

    def stop(self, wall: float) -> None:
        """The run is over now."""
        self._follow(self.quorum.stop(), wall)

    def snapshot(self, number: int, partial: str) -> None:
        """Every shard shall write itself, as it is now."""
        self._append(Snapshot(number, self.quorum.version, partial))

    def end(self, *, ok: bool, why: str) -> None:
        """The job is over: every shard exits when it comes to this entry."""
        for action in self.quorum.close():
            if isinstance(action, quorum.Discarded):
                self.notes.append(
                    f"{len(action.keys)} accepted gradients were not used: the run ended before their round closed"
                )
        self.note("ended", text="" if ok else why)
        self._append(End(ok, why))

    @property
    def lead(self) -> int:
        """Returns the worker that does the chief's work: the chief, or the first one alive while the chief is dead."""
        chief = self.quorum.workers.get(0)
        alive = self.quorum.alive
        return 0 if chief is None or chief.alive or chief.left or not alive else min(alive)

    # -- what is asked ------------------------------------------------------------------------------------------------

    def held(self, worker: int, incarnation: int, request: int) -> Held | None:
        """Returns what a worker's request waits for, if it is known and waits."""
        if self._requests.get(worker) != (incarnation, request):
            return None
        wait = self.quorum.waits_for(worker)
        return Held(request, wait.what, wait.have, wait.need, list(wait.missing)) if wait else None

    def fate(self, key: Key) -> Fate:
        """Returns what became of a gradient; never, if it was not decided on and its worker cannot push it any more."""
        known = self.quorum.workers.get(key.worker)
        gone = known is None or known.incarnation != key.incarnation or known.left or not known.alive
        return self._fates.get(key) or Fate(*key, "never" if gone else "open")

    def status(self) -> dict[str, Any]:
        """Returns the state of the run for people and reports."""
        quorum = self.quorum
        for index, worker in quorum.workers.items():
            wait = quorum.waits_for(index)
            tally = self.tally.worker(index)
            tally.state = "left" if worker.left else "dead" if not worker.alive else "waiting" if wait else "computing"
            tally.waits_for = wait.to_dict() if wait and worker.alive else None
        transports = sorted({w.transport for w in self.tally.workers.values() if w.transport})
        return {
            "rule": str(self.plan.rule),
            "global_step": quorum.version,
            "last_step": quorum.last_step,
            "live": quorum.alive,
            "stopped": quorum.stopped,
            "transport": "+".join(transports),
            **self.attendance.status(),
            **({"data": self.data.status()} if self.data else {}),
            **self.tally.snapshot(),
        }

    def unseen_by(self, shard: int) -> tuple[int, list[LogEntry]]:
        """Returns the log entries that a shard has not followed yet, and the number of the first."""
        first = max(self._followed.get(shard, 0), self.log_start)
        return first, self.log[first - self.log_start :]

    def followed(self, shard: int, count: int) -> None:
        """A shard has followed the log up to `count` entries; what all have followed is forgotten."""
        self._followed[shard] = max(count, self._followed.get(shard, 0))
        if len(self._followed) == self.plan.num_shards:
            done = min(self._followed.values())
            del self.log[: done - self.log_start]
            self.log_start = max(self.log_start, done)

    # -- how it follows -----------------------------------------------------------------------------------------------

    def _follow(self, actions: list[quorum.Action], wall: float, loss: float | None = None) -> None:
        for action in actions:
            match action:
                case quorum.Accepted() | quorum.Refused():
                    self._decided(action, wall, loss)
                case quorum.Applied(keys, version):
                    batches = self.data.applied(keys) if self.data else {}
                    self._append(Apply([(k.worker, k.incarnation, k.local_step) for k in keys], version, batches))
                    self.tally.updated(wall)
                case quorum.Released(worker, incarnation, _, version, stop):
                    request = self._requests[worker][1]
                    self.tally.worker(worker).release(wall)
                    self._append(Release(worker, incarnation, request, version, stop))
                case quorum.Died(worker, incarnation, why):
                    self.data.gone(worker, incarnation, for_good=False)
                    self.tally.worker(worker).release(wall)
                    self._wall = wall
                    self.note("died", worker, why)
                    chief = " (ps task 0 saves in its place)" if worker == 0 and self.plan.logdir else ""
                    self.notes.append(
                        f"/job:worker/task:{worker} counts as dead ({why}); the run goes on without it{chief}"
                    )
                    self._say(self.attendance.changed())
                case _:
                    pass

    def _decided(self, action: quorum.Accepted | quorum.Refused, wall: float, loss: float | None) -> None:
        accepted = isinstance(action, quorum.Accepted)
        key, staleness = action.key, action.met - action.version
        if action.reason is not quorum.Reason.OLD_INCARNATION:
            self.outcomes[key.worker] = Outcome(accepted, action.reason.value, action.met)
        self.tally.worker(key.worker).decided(
            accepted=accepted, reason=action.reason.value, staleness=staleness, loss=loss, at=wall
        )
        batches = self.data.decided(key, action.reason, accepted=accepted) if self.data else {}
        state = "accepted" if accepted else "refused"
        self._keep_fate(Fate(*key, state, action.reason.value, action.met, loss))
        if self._ledger is not None:
            released_at = self.tally.worker(key.worker).released_at
            self._ledger.write(
                Entry(
                    worker=key.worker,
                    incarnation=name_life(key.incarnation),
                    local_step=key.local_step,
                    version=action.version,
                    met=action.met,
                    staleness=staleness,
                    accepted=accepted,
                    reason=action.reason.value,
                    arrived_at=wall,
                    loss=loss,
                    took_s=round(wall - released_at, 6) if released_at is not None else None,
                    batches=batches or msgspec.UNSET,
                )
            )
        if not accepted:
            self._append(Drop([(key.worker, key.incarnation, key.local_step)]))

    def _append(self, entry: LogEntry) -> None:
        self.log.append(entry)
