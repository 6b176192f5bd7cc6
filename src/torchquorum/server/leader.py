"""The decisions of shard 0: who is in, which gradients make an update, who may go on. The others follow its log.

Owned by `Leading`. It hears of gradients (from its own shard and, through `Have`, from the others), asks the quorum once a
gradient has arrived everywhere, and appends what follows to the log. It holds no tensors and opens no sockets. What always
holds: every shard that follows the log applies the same gradients in the same order and answers the same requests at the
same version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchquorum.errors import NanLossError
from torchquorum.fastpath.records import GradientRecord
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.rules import quorum
from torchquorum.rules.quorum import Key, Quorum
from torchquorum.server.arrivals import Arrival, Arrivals
from torchquorum.server.assigning import Assigning
from torchquorum.server.barrier_waits import BarrierWaits
from torchquorum.server.decision_effects import DecisionEffects
from torchquorum.server.row_requests import AskedRows
from torchquorum.server.tally import Tally
from torchquorum.wire.messages import Drop, End, Fate, Held, LeasedBatches, Plan, Snapshot, TakeBatches
from torchquorum.wire.recorded import FAILED, JOIN, LEFT, PULL
from torchquorum.wire.settings import Settings


class Leader:
    """The quorum of a run, and what it is told.

    Attributes:
        quorum: Decides.
        effects: What follows from that; what it keeps has names here too.
        assigning: `session.assign()`.
        barrier_waits: The ends of epochs, and barriers.
        arrivals: The gradients that not every shard has yet.
        asked_rows: The requests for rows that not every shard has yet.
    """

    def __init__(
        self,
        plan: Plan,
        tally: Tally,
        ledger: LedgerWriter | None,
        versions: Sequence[int] = (),
        settings: Sequence[Settings] | None = None,
    ) -> None:
        at = versions or [0] * len(plan.rules)
        self.quorum = Quorum(
            plan.rule,
            plan.num_workers,
            version=at[0],
            last_step=plan.last_step,
            liveness_s=plan.liveness_s,
            more=list(zip(plan.rules[1:], at[1:], strict=True)),
        )
        self.plan, self._in_step = plan, plan.in_step
        self.effects = effects = DecisionEffects(plan, self.quorum, tally, ledger, settings)
        self.log, self.history, self.notes = effects.log, effects.history, effects.notes
        self.settings, self.membership, self.data = effects.settings, effects.membership, effects.data
        self.assigning = Assigning(effects)
        self.barrier_waits = BarrierWaits(effects)
        self.arrivals = Arrivals(plan.num_shards)
        self.asked_rows = AskedRows(plan.num_shards)

    # -- what happens -------------------------------------------------------------------------------------------------

    def begin(self, wall: float) -> None:
        """The variables exist, new or restored."""
        self.history.wall = wall
        self.effects.note(self.membership.begin())
        self.history.begin(self.plan)

    def join(
        self, worker: int, incarnation: int, request: int, now: float, wall: float, transport: str, lost: int = -1
    ) -> None:
        """A worker is ready to compute; `lost` is for the record."""
        if (worker, incarnation) in self.quorum.replaced:
            return
        self.effects.asks(worker, incarnation, request, JOIN, lost)
        known = self.quorum.workers.get(worker)
        counts = self.history.tally.worker(worker)
        counts.transport = transport
        counts.joined_at = wall if counts.joined_at is None else counts.joined_at
        if known is None or known.incarnation != incarnation:
            how = "joined" if known is None else "came back"
            self.notes.append(f"/job:worker/task:{worker} {how}")
            self.history.wall = wall
            lost = counts.begin_anew()
            self.history.note(how, worker, values={"lost": lost} if lost else None)
            self.assigning.forget(worker)
            if known is not None:
                self._drop_incomplete(Key(worker, known.incarnation, known.local_step + 1))
                self.data.gone(worker, known.incarnation, for_good=True)
                self.barrier_waits.gone(worker, known.incarnation)
        self.barrier_waits.joined(worker, incarnation)
        self.effects.follow(self.quorum.join(worker, incarnation, now), wall)
        self.effects.note(self.membership.changed())

    def _drop_incomplete(self, key: Key) -> None:
        """A worker's incarnation is over: a gradient of it that reached only some shards will never be complete."""
        if self.plan.num_shards > 1:
            self.arrivals.drop(key)
            self.log.append(Drop([(key.worker, key.incarnation, key.local_step)]))

    def pull(self, worker: int, incarnation: int, request: int, *, averaged: bool = False, state: bool = False) -> None:
        """A joined worker asks for the current version, outside of a push."""
        self.effects.asks(worker, incarnation, request, PULL)
        self.effects.release(worker, incarnation, request, averaged=averaged, state=state)

    @property
    def awaits_assignment(self) -> bool:
        """Whether a worker waits for an assignment."""
        return self.assigning.is_awaited

    @property
    def shares_data(self) -> bool:
        """Whether batches of data are handed out."""
        return bool(self.data)

    def arrived(
        self, shard: int, key: Key, request: int, now: float, wall: float, *, push: Arrival | None = None
    ) -> None:
        """A shard holds its part of a gradient; `push` comes with shard 0's own part."""
        known = self.quorum.workers.get(key.worker)
        current = known is not None and known.incarnation == key.incarnation
        if known is not None and current and self._is_decided(known, key, push):
            if push is not None:
                self.asked_again(key, request, push.track)
            return  # it has been decided on: its worker has its answer, or waits for it
        arrival = self.arrivals.add(shard, key, push)
        if push is not None and current:
            self.effects.pushes(key.worker, key.incarnation, request, key.local_step, push.track)
        if arrival is None:
            return
        # The gradient is on every shard: the quorum decides.
        assert arrival.version is not None
        self.effects.outcomes.pop(key.worker, None)
        self.history.tally.worker(key.worker).hold(wall)
        if arrival.settings and key.worker == self.lead and current:
            self.settings[arrival.track].offer(arrival.settings)
        if self.data and not self.data.counts(key):
            self.quorum.fence(key.worker, key.incarnation)
        actions = self.quorum.push(key, arrival.version, now, finite=arrival.finite, track=arrival.track)
        self.effects.follow(actions, wall, arrival)

    def _is_decided(self, known: quorum.Worker, key: Key, push: Arrival | None) -> bool:
        """Whether a gradient was decided on. One of another track may be ahead: on the fast path each track is looked at by itself."""
        return key.local_step <= (known.places[push.track].local_step if push is not None else known.local_step)

    def arrived_by_fastpath(self, record: GradientRecord, track: int = 0) -> None:
        """A worker has applied a gradient itself, or given it to a round of the fast path."""
        if record.rates:
            self.settings[track].offer_rates(record.rates)
        push = Arrival(
            record.computed_at,
            record.loss,
            track=track,
            norm=None if math.isnan(record.norm) else record.norm,
            sample=record.sample,
        )
        self.arrived(0, record.key, record.request, record.now, record.wall, push=push)

    def rows_asked(self, shard: int, worker: int, incarnation: int, request: int) -> None:
        """A shard knows which rows a worker asks it for; when all do, they answer at one place of the log."""
        entry = self.asked_rows.add(shard, worker, incarnation, request)
        if entry is not None:
            self.log.append(entry)

    def refuses_next(self, worker: int) -> bool:
        """Whether the next gradient of a live worker will be refused."""
        known = self.quorum.workers[worker]
        return known.fenced or bool(self.data and self.data.is_void(worker, known.incarnation, known.local_step))

    def asked_again(self, key: Key, request: int, track: int = 0) -> None:
        """A gradient that was decided on is pushed again, under a later request: its worker had lost the connection.

        It is answered under that request: when its wait is over, or now.
        """
        known = self.quorum.workers.get(key.worker)
        if (
            known is None
            or known.incarnation != key.incarnation
            or request <= self.effects.requests.get(key.worker, (0, 0))[1]
        ):
            return
        self.effects.pushes(key.worker, key.incarnation, request, key.local_step, track)
        if not known.held:
            self.effects.release(key.worker, key.incarnation, request)

    def leave(self, worker: int, incarnation: int, wall: float, *, failed: str = "") -> None:
        """A worker leaves for good; with `failed`, because its program failed."""
        known = self.quorum.workers.get(worker)
        if known is None or known.incarnation != incarnation:
            return
        counts = self.history.tally.worker(worker)
        counts.release(wall)
        self.history.wall = wall
        recorder = self.effects.recorder
        if recorder is not None and not known.left:
            recorder.gone(worker, incarnation, FAILED if failed else LEFT, failed)
        if not known.left and not failed:
            results = {"loss": counts.final_loss, "accuracy": counts.accuracy}
            values = {name: value for name, value in results.items() if value is not None}
            self.history.note("left", worker, values=values)
        self.data.gone(worker, incarnation, for_good=True)
        self.assigning.forget(worker)
        self.barrier_waits.gone(worker, incarnation)
        self.effects.follow(self.quorum.leave(worker, incarnation, failed=failed), wall)
        if NanLossError.__name__ in failed:
            self.effects.note(self.history.largest())
        self.assigning.release()
        if not self.data.over:
            self.effects.note(self.membership.changed())
        if worker == 0 and not failed and self.plan.logdir and self.quorum.alive and not self.quorum.stopped:
            self.notes.append("/job:worker/task:0 is done; the others go on (ps task 0 saves in its place)")

    def take_batches(self, take: TakeBatches, now: float, wall: float) -> LeasedBatches:
        """A joined worker asks for its share of the data."""
        answer = self.data.take(take, self.quorum.live, stopped=self.quorum.stopped)
        self.notes += self.data.notes
        self.data.notes.clear()
        if self.effects.recorder is not None:
            self.effects.recorder.handed(take, answer)
        if answer.numbers:
            self.effects.follow(self.quorum.resume(take.worker, take.incarnation, now), wall)
        return answer

    def pause(self, worker: int, incarnation: int, now: float, wall: float) -> None:
        """A worker has nothing to compute, because others have what is left of the data: rounds do not wait for it meanwhile."""
        self.effects.follow(self.quorum.pause(worker, incarnation, now), wall)

    def lost(self, worker: int, incarnation: int, why: str, wall: float) -> None:
        """A worker's process is gone."""
        self.effects.follow(self.quorum.lost(worker, incarnation, why), wall)
        self.assigning.release()

    def tick(self, now: float, wall: float) -> None:
        """Time has passed."""
        self.history.wall = wall
        self.effects.follow(self.quorum.expire(now), wall)
        if self.awaits_assignment:
            self.assigning.release()

    def stop(self, wall: float) -> None:
        """The run is over now."""
        self.effects.follow(self.quorum.stop(), wall)
        self.assigning.release()

    def conclude(self, wall: float) -> None:
        """The chief's loop is over: if the last step was made, nothing else of it is waited for."""
        self.effects.follow(self.quorum.conclude(), wall)

    def snapshot(self, number: int, partial: str, base: str = "", base_partial: str = "") -> None:
        """Every shard writes itself, as it is now; of tables perhaps what has changed since the checkpoint `base`."""
        self.log.append(Snapshot(number, self.quorum.version, partial, base, base_partial))

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
        """Returns the worker that does the chief's work: the chief, or the first one alive while the chief is dead.

        Also when the chief's part is done and the run is not: its settings would stay what they were then.
        """
        chief, alive = self.quorum.workers.get(0), self.quorum.alive
        is_away = chief is not None and not chief.alive and (chief.gone or not self.quorum.stopped)
        return min(alive) if is_away and alive else 0

    def changes_settings(self, track: int = 0) -> bool:
        """Whether the next update has other settings than the last: the gradient that brought them was refused."""
        return self.settings[track].pending

    @property
    def position(self) -> int:
        """Returns where workers that are in step stand now, as `wire.plan.Plan.in_step` counts."""
        return sum(self.quorum.tracks[k].version for k in self._in_step)

    def wait_of(self, worker: int, incarnation: int, request: int) -> Held | None:
        """Returns what a worker's request waits for, if it is known and waits."""
        if self.effects.requests.get(worker) != (incarnation, request):
            return None
        if (held := self.assigning.wait_of(worker, request)) is not None:
            return held
        wait = self.quorum.waits_for(worker)
        if wait is None:
            return None
        name = self.plan.names[wait.track]
        what = f"{wait.what} of {name}" if name else wait.what
        return Held(request, what, wait.have, wait.need, list(wait.missing))

    def fate(self, key: Key) -> Fate:
        """Returns what became of a gradient; never, if it was not decided on and its worker can no longer push it."""
        known = self.quorum.workers.get(key.worker)
        gone = known is None or known.incarnation != key.incarnation or known.left or not known.alive
        return self.history.fate(key) or Fate(*key, "never" if gone else "open")
