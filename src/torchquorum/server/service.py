"""What a ps task answers to each message: handle(message) -> replies. Sockets, threads and the clock stay outside.

Owned by the ps thread, driven by `torchquorum.server.serve` and by tests. A message that makes no sense gets a Fault and
changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torchquorum.transport.messages as m
from torchquorum.errors import ConfigError, LostPlaceError, TaskLostError
from torchquorum.formats.checkpoint_write import clear_left_behind
from torchquorum.formats.journal import JournalError
from torchquorum.formats.ledger import LedgerWriter, open_ledger
from torchquorum.formats.storage import locate
from torchquorum.rules.quorum import Key
from torchquorum.server.board_host import BoardHost, may_change
from torchquorum.server.buffers import BufferHome, check_same_buffers
from torchquorum.server.checkpoints import Checkpoints, Parts
from torchquorum.server.creation import check_creation
from torchquorum.server.durable import take_up_journal
from torchquorum.server.ending import Ending
from torchquorum.server.followers import Followers
from torchquorum.server.leader import Arrival, Leader
from torchquorum.server.me import Me
from torchquorum.server.shard import Reply, Shard
from torchquorum.server.strangers import Strangers, greet, not_joined
from torchquorum.server.tally import Tally
from torchquorum.transport import codec
from torchquorum.transport.channel import Peer
from torchquorum.transport.codec import Frame

LEADER = (
    b"\0leader"  # stands for shard 0 as the peer of another shard; nobody may give himself a name with a zero in front
)
MAX_FAULT = 4000
MOST_WAITING = 1000


class Service:
    """One ps task. `say` prints a line for people."""

    def __init__(self, me: Me, say: Callable[[str], None]) -> None:
        self.me, self._say = me, say
        self.shard: Shard | None = None
        self.leader: Leader | None = None
        self.tally = Tally(me.started_at)
        self.ledger: LedgerWriter | None = None
        self.refused = ""  # why shard 0 will not have this one
        self.turned_away: Callable[[], dict[str, int]] = dict
        self.pids: dict[tuple[int, int], int] = {}
        self.strangers = Strangers()
        self._waiting: list[tuple[Peer, m.Join]] = []
        self.followers = Followers(me)
        self._ending = Ending()
        self.leader_heard_at: float | None = None
        self.parts = Parts(me.index)
        self.checkpoints: Checkpoints | None = None
        self.buffers: BufferHome | None = None
        self.board: BoardHost | None = None
        self.reign = 0

    # -- messages -----------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, frames: Sequence[Frame], now: float, wall: float) -> list[Reply]:
        """Answers one message."""
        if peer == LEADER:
            self.leader_heard_at = now
        try:
            message, tensors = codec.split(frames)
        except codec.WireError as error:
            self.strangers.talked(peer)
            return [Reply(peer, m.Fault("wire", str(error)[:MAX_FAULT]))]
        try:
            before = self._look_at_board(close=may_change(message, self.shard))
            return before + self._route(peer, message, tensors, now, wall)
        except (AssertionError, JournalError, TaskLostError):
            raise  # a mistake of our own; or what was promised to survive, or an update, cannot be made
        except Exception as error:  # whatever a stranger may have sent, the others are served on
            self.strangers.talked(peer)
            kind, text = type(error).__name__, f"{self.me.task}: {error}"[:MAX_FAULT]
            return [Reply(peer, m.Fault(kind, text, getattr(message, "request", -1)))]

    def _route(self, peer: Peer, message: m.AnyMessage, frames: list[Frame], now: float, wall: float) -> list[Reply]:
        match message:
            case m.Push():
                replies = self._push(peer, message, frames, now, wall)
            case m.Beat():
                replies = self._beat(peer, message, now)
            case m.Here():
                if self.shard is not None and self.shard.knows(message.worker, message.incarnation):
                    self.shard.heard_from(message.worker, peer, message.request)
                replies = []
            case m.Probe():
                replies = self._probe(peer, message, now)
            case m.Have() | m.ShardHello():
                replies = self._heard_of_shard(peer, message, now, wall)
            case m.Log():
                replies = self._log(peer, message)
            case m.Hello():
                replies = self._hello(peer, message)
            case m.Create():
                replies = self._create(peer, message, frames, now, wall)
            case m.Join():
                replies = self._join(peer, message, now, wall)
            case m.Pull():
                replies = self._pull(peer, message)
            case m.Leave():
                replies = self._leave(peer, message, now, wall)
            case m.Save():
                replies = self._save(peer, message, now)
            case m.Settle():
                self.strangers.talked(peer)
                replies = [Reply(peer, m.Settled(self.checkpoints is None or self.checkpoints.settle()))]
            case m.Stop():
                replies = self._stop(peer, message, wall)
            case m.Position():
                replies = self._position(message)
            case m.Buffers() | m.TakeBuffers():
                replies = self._about_buffers(peer, message, frames, now)
            case m.Part():
                replies = self._part(peer, message)
            case m.PartTaken() if peer == LEADER:
                self.parts.untold = None
                replies = []
            case m.StatusRequest():
                self.strangers.talked(peer)
                replies = [Reply(peer, m.Status(self.status()))]
            case m.MeanRequest():
                self.strangers.talked(peer)
                replies = [Reply(peer, *self._ready().mean.answer())]
            case m.TakeBatches() | m.UseBatches():
                replies = self._about_data(peer, message, now, wall)
            case m.Scale():
                self.strangers.talked(peer)
                replies = [Reply(peer, self._scale(message))]
            case m.FateOf():
                key = Key(message.worker, message.incarnation, message.local_step)
                replies = [Reply(peer, self.leader.fate(key) if self.leader else m.Fate(*key, "never"))]
            case m.Alive() if peer == LEADER:
                replies = []
            case m.Fault("protocol") if peer == LEADER:
                self.refused = message.text
                replies = []
            case m.Fault():
                replies = []  # two ps tasks would answer each other for ever
            case _:
                replies = [Reply(peer, m.Fault("wire", f"{type(message).__name__} is not for a ps task"))]
        return replies + self._advance()

    def tick(self, now: float, wall: float) -> list[Reply]:
        """Time has passed: deaths, the end of the job, the ledger's buffer."""
        untold = self.parts.take_results(self.shard, self.checkpoints)
        replies = [Reply(LEADER, untold)] if untold is not None and self.me.index > 0 else []
        if self.leader is None or self.checkpoints is None:
            return replies
        saves = self.checkpoints.busy or self.checkpoints.stands_in_now(now)
        replies += self._look_at_board(close=saves or self.leader.quorum.somebody_silent(now))
        self.checkpoints.advance(now)
        self._miss_shards(now)
        if self._waiting and not self.checkpoints.first_is_due:
            replies += self._let_in(now, wall)
        self.leader.tick(now, wall)
        self.checkpoints.stand_in_for_chief(now)
        self._check_end(now)
        if self.ledger is not None:
            self.ledger.flush()
        if self.buffers is not None:
            replies += self._said_of_buffers(self.buffers.tick(now, self.leader.quorum.alive))
        return replies + self._advance()

    def _miss_shards(self, now: float) -> None:
        """A ps task that is gone writes no part: the checkpoint that waits for it is given up."""
        saving = self.checkpoints.saving if self.checkpoints is not None else None
        missed = self.followers.missed(saving.parts, saving.begun_at, now) if saving is not None else None
        if missed is not None and self.checkpoints is not None:
            self.checkpoints.fail(missed)
            # The last steps are lost with it: a run that ends so has not ended well.
            self._ending.failed |= self.leader is not None and self.leader.quorum.stopped

    def process_ended(self, worker: int, incarnation: int, now: float, wall: float) -> list[Reply]:
        """The process of a worker on this host is gone."""
        self.pids.pop((worker, incarnation), None)
        if self.leader is None:
            return []
        replies = self._look_at_board(close=True)
        self.leader.lost(worker, incarnation, "its process ended", wall)
        self._check_end(now)
        return replies + self._advance()

    def heartbeat(self) -> Reply | None:
        """What a shard other than 0 tells shard 0 now and then."""
        if self.me.index == 0:
            return None
        followed = self.shard.followed if self.shard else 0
        me = self.me
        hello = m.ShardHello(
            me.index, me.incarnation, followed, os.getpid(), me.host, self.reign, m.PROTOCOL, m.PACKAGE
        )
        return Reply(LEADER, hello)

    def commit(self) -> None:
        """Waits until the disk has the journal, and the ledger with it, where a run is to survive a loss of power."""
        journal = self.shard.journal if self.shard is not None else None
        if journal is not None and journal.uncommitted:
            if self.ledger is not None:
                self.ledger.sync()
            journal.commit()

    @property
    def ended(self) -> m.End | None:
        """Returns the end of the job, once it has come."""
        shard = self.shard  # which another thread may take away
        return shard.ended if shard else None

    # -- one by one ---------------------------------------------------------------------------------------------------

    def _hello(self, peer: Peer, hello: m.Hello) -> list[Reply]:
        self.strangers.talked(peer)
        return [Reply(peer, greet(self.me, hello, self.pids, created=self.shard is not None))]

    def _create(self, peer: Peer, create: m.Create, frames: list[Frame], now: float, wall: float) -> list[Reply]:
        if self.shard is not None:
            self.shard.check_plan(create.plan, "the chief")
            if not create.replace or create.reign == self.reign:
                again = create.reign != 0 and create.reign == self.reign  # the same creation, asked for twice
                return [Reply(peer, m.Created(self.shard.version, not again))]
        check_creation(self.me, create, frames)
        if self.shard is not None:
            self._give_up()
        self.reign = create.reign
        positions: dict[str, Any] = {}
        data: dict[str, Any] = {}
        buffers = self.me.index == 0 and bool(create.plan.buffers)
        self.buffers = BufferHome.opened(create.plan, frames[-1], self._peer_of, create.restore) if buffers else None
        if create.restore is None:
            self.shard = Shard(self.me.index, create.plan, frames[0], frames[1])
        else:
            self.shard, manifest = Shard.restored(self.me.index, create.plan, locate(create.restore))
            positions, data = manifest.workers, manifest.data
        try:
            applied = take_up_journal(self.shard, create, lambda line: self._say(f"{self.me.task}: {line}"))
        except BaseException:
            self.shard.close()
            self.shard = None
            raise
        self.shard.reign = self.reign
        if self.me.index == 0:
            self.ledger = open_ledger(create.plan.logdir, lambda line: self._say(f"{self.me.task}: {line}"))
            self.leader = Leader(create.plan, self.tally, self.ledger, self.shard.version)
            self.leader.remember(applied)
            self.leader.data.restore(data, (record.batches for record in applied))
            self.leader.begin(wall)
            self.checkpoints = Checkpoints(
                self.leader, self.parts.saver, lambda line: self._say(f"{self.me.task}: {line}"), self.buffers
            )
            self._said_of_buffers([])
            self.checkpoints.restored, self.checkpoints.reign = positions, self.reign
            self.board = BoardHost(self.shard, self.leader, self.checkpoints) if self.shard.board is not None else None
            folder = locate(create.plan.logdir) if create.plan.logdir is not None else None
            if isinstance(folder, Path):
                with suppress(OSError):  # of a run that was killed
                    clear_left_behind(folder)
            if create.plan.durable and create.restore is None:
                self.checkpoints.save_first(now)
        return [Reply(peer, m.Created(self.shard.version, False)), *self._let_in(now, wall)]

    def _give_up(self) -> None:
        """Another ps has lost its variables: ours go too, and all are restored together."""
        assert self.shard is not None
        self.shard.close()
        if self.checkpoints is not None:
            self.checkpoints.give_up()
        self.shard = self.leader = self.checkpoints = self.buffers = self.board = self.parts.untold = None
        self.followers.begin_again()
        if self.ledger is not None:
            self.ledger.close()
            self.ledger = None

    def _join(self, peer: Peer, join: m.Join, now: float, wall: float) -> list[Reply]:
        if self.shard is None or (self.checkpoints is not None and self.checkpoints.first_is_due):
            self.strangers.talked(peer)
            others = [(p, j) for p, j in self._waiting if p != peer]
            self._waiting = [*others[-MOST_WAITING:], (peer, join)]
            return [Reply(peer, self._waiting_for_chief(join.request))]
        if not 0 <= join.worker < self.shard.plan.num_workers:
            raise ValueError(f"worker {join.worker}: the cluster has {self.shard.plan.num_workers} workers")
        if join.plan is not None:
            self.shard.check_plan(join.plan, f"/job:worker/task:{join.worker}")
            check_same_buffers(self.shard.plan, join.plan, f"/job:worker/task:{join.worker}")
        if self.shard.replaced(join.worker, join.incarnation):
            return [Reply(peer, self._not_joined(join.worker, join.incarnation, join.request))]
        known = self.shard.knows(join.worker, join.incarnation)
        if known and not self.shard.heard_from(join.worker, peer, join.request):
            return []
        if not self.shard.joined_by(join):
            self.shard.welcome(peer, join)
        if self.leader is not None:
            if again := self._again(join):
                return again
            transport = "shm" if join.gradients is not None else "tcp"
            self.leader.join(join.worker, join.incarnation, join.request, now, wall, transport)
            return []
        return self._again(join)

    def _waiting_for_chief(self, request: int) -> m.Held:
        if self.shard is not None:
            return m.Held(request, "the first checkpoint, from which a journal goes on", 0, 1, [])
        return m.Held(request, m.CREATION, 0, 1, [0])

    def _let_in(self, now: float, wall: float) -> list[Reply]:
        """Answers those that have waited to join."""
        waiting, self._waiting = self._waiting, []
        replies: list[Reply] = []
        for guest, join in waiting:
            replies += self.handle(guest, [codec.encode(join)], now, wall)
        return replies

    def _push(self, peer: Peer, push: m.Push, frames: list[Frame], now: float, wall: float) -> list[Reply]:
        shard = self._ready()
        if not shard.knows(push.worker, push.incarnation):
            return [Reply(peer, self._not_joined(push.worker, push.incarnation, push.request))]
        if not shard.heard_from(push.worker, peer, push.request):
            return []
        if again := self._again(push):
            return again
        key = Key(push.worker, push.incarnation, push.local_step)
        if shard.decided(key):
            if self.leader is not None:
                self.leader.asked_again(key, push.request)
            return []
        if not shard.holds(key):
            shard.store(push, frames)
        shard.brought_by(push.request, key)
        if self.leader is None:
            return [
                Reply(
                    LEADER, m.Have(self.me.index, *key[:2], push.request, push.local_step, shard.followed, self.reign)
                )
            ]
        self.leader.arrived(0, key, push.request, now, wall, push=Arrival(push.version, push.loss, push.finite))
        return []

    def _not_joined(self, worker: int, incarnation: int, request: int) -> m.Fault:
        return not_joined(self.me, self.shard, worker, incarnation, request)

    def _pull(self, peer: Peer, pull: m.Pull) -> list[Reply]:
        shard = self._ready()
        if pull.averaged and shard.averages is None:
            raise ConfigError(
                "no moving averages are kept; give tq.Optimizer an average=tq.ExponentialMovingAverage(0.99)"
            )
        if not shard.knows(pull.worker, pull.incarnation):
            return [Reply(peer, self._not_joined(pull.worker, pull.incarnation, pull.request))]
        if not shard.heard_from(pull.worker, peer, pull.request):
            return []
        again = self._again(pull)
        if again or self.leader is None:
            return again
        if not self.leader.pull(pull.worker, pull.incarnation, pull.request, averaged=pull.averaged):
            return [Reply(peer, self._not_joined(pull.worker, pull.incarnation, pull.request))]
        return []

    def _probe(self, peer: Peer, probe: m.Probe, now: float) -> list[Reply]:
        if any(p == peer for p, _ in self._waiting):
            return [Reply(peer, self._waiting_for_chief(probe.request))]
        if self.shard is None:
            return [Reply(peer, m.Unknown(probe.request, self.reign))]
        if again := self._again(probe):
            return again
        key = self.shard.undecided(probe.worker, probe.incarnation, probe.request)
        elsewhere = m.Held(probe.request, "the other ps tasks", 0, 1, [])
        if self.leader is None:
            hello = self.heartbeat()
            news = [hello] if hello else []
            if key is None:
                return [Reply(peer, m.Unknown(probe.request, self.reign)), *news]
            have = m.Have(self.me.index, *key[:2], probe.request, key.local_step, self.shard.followed, self.reign)
            return [Reply(peer, elsewhere), Reply(LEADER, have), *news]
        self.leader.quorum.seen(probe.worker, probe.incarnation, now)
        held = self.leader.held(probe.worker, probe.incarnation, probe.request)
        if held is not None and self.checkpoints is not None:
            held.save = self.checkpoints.wants_position(probe.worker)
        return [Reply(peer, held or (elsewhere if key is not None else m.Unknown(probe.request, self.reign)))]

    def _beat(self, peer: Peer, beat: m.Beat, now: float) -> list[Reply]:
        if self.leader is None:
            return [Reply(peer, m.Alive(0, False))]
        self.leader.quorum.seen(beat.worker, beat.incarnation, now)
        leave = self.leader.attendance.must_leave(beat.worker, beat.incarnation)
        return [Reply(peer, m.Alive(self.leader.quorum.version, self.leader.quorum.stopped, self.leader.lead, leave))]

    def _leave(self, peer: Peer, leave: m.Leave, now: float, wall: float) -> list[Reply]:
        if self.leader is not None:
            known = self.leader.quorum.workers.get(leave.worker)
            if known is not None and known.incarnation == leave.incarnation and not known.left:
                tally = self.tally.worker(leave.worker)
                tally.final_loss = leave.loss if leave.loss is not None else tally.final_loss
                tally.accuracy = leave.accuracy if leave.accuracy is not None else tally.accuracy
                self._ending.left(leave.worker, finished=leave.finished)
            self.leader.leave(leave.worker, leave.incarnation, wall)
            self._check_end(now)
        if self.shard is not None:
            self.shard.forget(leave.worker, leave.incarnation)
        return [Reply(peer, m.Bye())]

    def _heard_of_shard(self, peer: Peer, message: m.Have | m.ShardHello, now: float, wall: float) -> list[Reply]:
        log_ends = self.shard.followed if self.shard else 0
        refused = self.followers.hear(peer, message, self.reign, log_ends, now)
        if refused is not None or self.leader is None:
            return [Reply(peer, refused)] if refused is not None else []
        self.leader.followed(message.shard, message.followed)
        if isinstance(message, m.Have):
            key = Key(message.worker, message.incarnation, message.local_step)
            self.leader.arrived(message.shard, key, message.request, now, wall)
        else:
            self.followers.sent[message.shard] = message.followed  # what it has not followed is sent again
        return [Reply(peer, m.Alive(self.leader.quorum.version, self.leader.quorum.stopped))]

    # -- the log ------------------------------------------------------------------------------------------------------

    def _look_at_board(self, *, close: bool) -> list[Reply]:
        """Takes up what workers have made on the board; closes it before anything that it cannot stand beside."""
        if self.board is None or not self.board.is_open:
            return []
        made, unfinished = self.board.close() if close else (self.board.look(), [])
        self.board.take_up(made, made=True)
        replies = self._advance(told=True) if made else []
        self.board.take_up(unfinished, made=False)
        return replies + (self._advance(opens=False) if unfinished else [])  # what closed it is still to come

    def _advance(self, *, told: bool = False, opens: bool = True) -> list[Reply]:
        """Shard 0 follows its own log at once and sends the news to the others."""
        if self.leader is None or self.shard is None:
            return []
        replies: list[Reply] = []
        for note in self.leader.notes:
            self._say(note)
        self.leader.notes.clear()
        news = self.leader.unseen_by(0)[1]
        if news and self.shard.journal is not None:
            self.leader.flush()  # before the journal: what the variables have after a crash the ledger has too
        for entry in news:
            outcome = self.leader.outcomes.get(entry.worker) if isinstance(entry, m.Release) else None
            followed = self.shard.follow(entry, outcome, told=told)
            if isinstance(entry, m.Release):
                for reply in followed:
                    self._about_positions(reply.message, entry.worker)
            replies += followed
        self.parts.write(self.shard)
        end = self.shard.followed
        replies += self.followers.news(self.leader, self.reign, end)
        self.leader.followed(0, end)
        if self.board is not None and opens and not told and self.board.may_open():
            self.board.open()
        return replies

    def _again(self, asked: m.Join | m.Push | m.Pull | m.Probe) -> list[Reply]:
        """Returns the answer to a request again, if there was one, with all that was in it."""
        again = self._ready().answer(asked.worker, asked.incarnation, asked.request)
        for reply in again:
            self._about_positions(reply.message, asked.worker)
        return again

    def _about_positions(self, answer: m.Message, worker: int) -> None:
        """Asks a worker for its position if it is wanted, and gives one that joins the position that was saved."""
        if isinstance(answer, m.Variables) and self.checkpoints is not None and self.shard is not None:
            answer.save = self.checkpoints.wants_position(worker)
            if self.shard.is_join(worker, answer.request):
                answer.position = self.checkpoints.restored.get(str(worker))

    def _log(self, peer: Peer, log: m.Log) -> list[Reply]:
        if peer != LEADER:
            raise ValueError("only shard 0 writes the log")
        if log.reign != self.reign:
            return []
        shard = self._ready()
        replies: list[Reply] = []
        for number, entry in enumerate(log.entries, log.first):
            if number == shard.followed:
                replies += shard.follow(entry)
        self.parts.write(shard)
        return replies

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, peer: Peer, save: m.Save, now: float) -> list[Reply]:
        if self.me.index != 0:
            raise ValueError("only shard 0 makes checkpoints")
        self._ready()  # a chief that asks one that was restarted has to hear that the variables are lost
        assert self.leader is not None and self.checkpoints is not None
        known = self.leader.quorum.workers.get(save.worker)
        if known is None or known.incarnation != save.incarnation:
            return [Reply(peer, self._not_joined(save.worker, save.incarnation, -1))]
        return [Reply(peer, self.checkpoints.save(save.number, save.folder, save.keep, now))]

    def _stop(self, peer: Peer, stop: m.Stop, wall: float) -> list[Reply]:
        if self.me.index != 0:
            raise ValueError("only shard 0 can stop the run")
        self._ready()
        assert self.leader is not None
        known = self.leader.quorum.workers.get(stop.worker)
        if known is None or known.incarnation != stop.incarnation:
            return [Reply(peer, self._not_joined(stop.worker, stop.incarnation, -1))]
        return [Reply(peer, m.Alive(self.leader.quorum.version, True)), *self.stop(wall)]

    def stop(self, wall: float) -> list[Reply]:
        """Ends the run: everybody is released and told so."""
        if self.leader is None:
            return []
        replies = self._look_at_board(close=True)
        self.leader.stop(wall)
        return replies + self._advance()

    def _position(self, position: m.Position) -> list[Reply]:
        if self.leader is not None and self.checkpoints is not None:
            known = self.leader.quorum.workers.get(position.worker)
            if known is not None and known.incarnation == position.incarnation:
                self.checkpoints.position(position.worker, position.version, position.body)
        return []

    def _about_data(self, peer: Peer, message: m.TakeBatches | m.UseBatches, now: float, wall: float) -> list[Reply]:
        if self.leader is None:
            raise LostPlaceError("shares out no data: only ps task 0 does, once the chief has created the variables")
        known = self.leader.quorum.workers.get(message.worker)
        if known is None or known.incarnation != message.incarnation or known.left:
            return [Reply(peer, self._not_joined(message.worker, message.incarnation, message.request))]
        if isinstance(message, m.UseBatches):
            return [Reply(peer, self.leader.data.use(message))]
        replies = self._look_at_board(close=message.void > known.local_step)  # its next gradient will be refused
        answer = self.leader.take_batches(message, now, wall)
        if message.idle and not (answer.numbers or answer.over or answer.void):
            replies += self._look_at_board(close=True)
            self.leader.pause(message.worker, message.incarnation, now, wall)
        return [*replies, Reply(peer, answer)]

    def _scale(self, scale: m.Scale) -> m.Scaled:
        if self.leader is None:
            raise ConfigError(
                "only /job:ps/task:0 knows the run, once the chief has created the variables: ask that one"
            )
        return self.leader.attendance.scale(scale.workers)

    def _about_buffers(
        self, peer: Peer, message: m.Buffers | m.TakeBuffers, frames: list[Frame], now: float
    ) -> list[Reply]:
        if self.leader is None or self.checkpoints is None or self.buffers is None:
            raise LostPlaceError("holds no buffers of the model: only ps task 0 does, once the chief has created them")
        known, alive = self.leader.quorum.workers.get(message.worker), self.leader.quorum.alive
        if known is None or known.incarnation != message.incarnation:
            return [Reply(peer, self._not_joined(message.worker, message.incarnation, -1))]
        if isinstance(message, m.TakeBuffers):
            return self._said_of_buffers(self.buffers.take(peer, message, self.leader.quorum.version, now, alive))
        replies = self.buffers.heard(message, frames, now, alive)
        if message.number < 0:
            self.checkpoints.buffers_heard(message.worker)
        return self._said_of_buffers(replies)

    def _said_of_buffers(self, replies: list[Reply]) -> list[Reply]:
        for line in self.buffers.said if self.buffers is not None else ():
            self._say(f"{self.me.task}: {line}")
        if self.buffers is not None:
            self.buffers.said.clear()
        return replies

    def _peer_of(self, worker: int) -> Peer | None:
        return self.shard.peer_of(worker) if self.shard is not None else None

    def _part(self, peer: Peer, part: m.Part) -> list[Reply]:
        if self.checkpoints is None or not 0 < part.shard < self.me.cluster.num_tasks("ps"):
            raise ValueError("only shard 0 takes parts of checkpoints, from the other shards")
        self.checkpoints.part(part)
        return [Reply(peer, m.PartTaken(part.number))]

    def _check_end(self, now: float) -> None:
        if self.leader is not None and self.ended is None:
            self._ending.check(self.leader, self.checkpoints, now)

    def _ready(self) -> Shard:
        if self.shard is None:
            raise LostPlaceError("holds no variables yet: the chief, /job:worker/task:0, has not created them")
        return self.shard

    def status(self) -> dict[str, Any]:
        """Returns the state of the run for people and reports."""
        body: dict[str, Any] = {
            "task": str(self.me.task),
            "ready": self.shard is not None,
            "ps": self.me.cluster.num_tasks("ps"),
            "workers": self.me.cluster.num_tasks("worker"),
            "turned_away": self.turned_away(),
        }
        if self.leader is None:
            return body
        return {**body, **self.leader.status()}
