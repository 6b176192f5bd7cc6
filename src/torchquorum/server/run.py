"""One creation of the variables on a ps task: `Leading` on shard 0, `Following` on the others.

Made by `creation`, owned by the service, which hands it what workers and shards send. What always holds: everything here
belongs to one generation and ends with it; shard 0 follows its own log at once, the others when they are sent it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torchquorum.wire.messages as m
from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError, LostPlaceError
from torchquorum.fastpath.host import FastPathHost, may_change
from torchquorum.formats.checkpoint_write import clear_left_behind
from torchquorum.formats.journal import Record
from torchquorum.formats.ledger_write import open_ledger
from torchquorum.formats.storage import locate
from torchquorum.rules.quorum import Key
from torchquorum.server.buffer_home import BufferHome, check_same_buffers
from torchquorum.server.checkpoints import Checkpoints, part_of
from torchquorum.server.ending import Ending
from torchquorum.server.folder_watch import FolderWatch
from torchquorum.server.followers import Followers
from torchquorum.server.identity import Identity
from torchquorum.server.leader import Arrival, Leader
from torchquorum.server.plan_difference import check_same_plan
from torchquorum.server.reply import LEADER, Incoming, Reply
from torchquorum.server.saver import Published, Saver, Written
from torchquorum.server.shard import Shard
from torchquorum.server.tally import Tally
from torchquorum.wire.channel import Peer

NO_BUFFERS = "holds no buffers of the model: only ps task 0 does, once the chief has created them"


@dataclass(frozen=True, kw_only=True)
class TaskLife:
    """What a ps task has from its start to its end, however often the variables are created.

    Attributes:
        me: Who this task is.
        say: Prints a line for people.
        clock: Tells the time to what reads and writes files.
        saver: Writes checkpoints.
        tally: The counts of the job.
        followers: The other ps tasks.
        ending: Whether the job is over, and how.
    """

    me: Identity
    say: Callable[[str], None]
    clock: Clock = SYSTEM
    saver: Saver
    tally: Tally
    followers: Followers
    ending: Ending = field(default_factory=Ending)

    def announce(self, line: str) -> None:
        """Prints a line for people that begins with this task's name."""
        self.say(f"{self.me.task}: {line}")


class Run:
    """What every ps task has of one creation of the variables."""

    def __init__(self, life: TaskLife, shard: Shard) -> None:
        self.life, self.shard, self.plan, self.generation = life, shard, shard.plan, shard.generation
        self._watch = FolderWatch(shard, life.announce)
        self.broken = ""  # why an update, or what was promised of it, could not be made; the run is over then

    @property
    def admits(self) -> bool:
        """Whether workers may join now."""
        return True

    @property
    def fastpath_is_open(self) -> bool:
        """Whether workers may be making updates by themselves now."""
        return False

    # -- what workers send --------------------------------------------------------------------------------------------

    def join(self, got: Incoming[m.Join]) -> list[Reply]:
        """A worker is ready to compute."""
        join, workers = got.message, self.shard.workers
        who = f"/job:worker/task:{join.worker}"
        if not 0 <= join.worker < self.plan.num_workers:
            raise ValueError(f"worker {join.worker}: the cluster has {self.plan.num_workers} workers")
        if join.plan is not None:
            check_same_plan(self.plan, join.plan, who)
            check_same_buffers(self.plan, join.plan, who)
        if workers.replaced(join.worker, join.incarnation):
            return [got.reply(self.not_joined(join.worker, join.incarnation, join.request))]
        if workers.knows(join.worker, join.incarnation) and not workers.is_current(join.worker, got.peer, join.request):
            return []
        if not workers.joined_by(join):
            self.shard.admit(got.peer, join)
        return self._answer(join) or self._joined(got)

    def push(self, got: Incoming[m.Push]) -> list[Reply]:
        """A joined worker sends a gradient."""
        push, gradients = got.message, self.shard.gradients
        self.shard.workers[push.worker].revision = push.revision
        if answer := self._answer(push):
            return answer
        key = Key(push.worker, push.incarnation, push.local_step)
        if gradients.is_decided(key):
            self._pushed_again(key, push.request)
            return []
        if key not in gradients:
            self.shard.store(push, got.frames)
        gradients.note_request(push.request, key)
        return self._arrived(got, key)

    def pull(self, got: Incoming[m.Pull]) -> list[Reply]:
        """A joined worker asks for the current version."""
        if got.message.averaged and self.shard.averages is None:
            raise ConfigError(
                "no moving averages are kept; give tq.Optimizer an average=tq.ExponentialMovingAverage(0.99)"
            )
        return self._answer(got.message) or self._pulled(got.message)

    def keep_values(self, got: Incoming[m.Values]) -> list[Reply]:
        """A joined worker sends values that it is about to assign."""
        values = got.message
        if len(got.frames) != 1 or not all(0 <= v < len(self.plan.variables) for v in values.variables):
            raise ValueError(f"values of variables {values.variables[:8]} with {len(got.frames)} frames make no sense")
        key = (values.worker, values.incarnation, values.number)
        self.shard.keep_values(key, values.variables, got.frames[0])
        return [got.reply(m.ValuesKept(values.number))]

    def assign(self, got: Incoming[m.Assign]) -> list[Reply]:
        """A joined worker has come to an assignment."""
        return self._answer(got.message) or self._assigning(got)

    def probe(self, got: Incoming[m.Probe]) -> list[Reply]:
        """A worker has had no answer to a request: it gets it again, or what it waits for."""
        probe = got.message
        if answer := self._answer(probe):
            return answer
        return self._probed(got, self.shard.gradients.of_request(probe.worker, probe.incarnation, probe.request))

    def leave(self, got: Incoming[m.Leave]) -> list[Reply]:
        """A worker leaves for good."""
        self.shard.forget(got.message.worker, got.message.incarnation)
        return [got.reply(m.Bye())]

    def not_joined(self, worker: int, incarnation: int, request: int = -1) -> m.Fault:
        """Returns the answer to a process that speaks as a worker and has not joined as it, or was replaced."""
        task = self.life.me.task
        if self.shard.workers.replaced(worker, incarnation):
            text = (
                f"{task} has let a newer process in as /job:worker/task:{worker}, so this one is out. "
                "Start each worker once, with an index of its own."
            )
            return m.Fault("replaced", text, request)
        return m.Fault("LostPlaceError", f"{task} does not know this process as /job:worker/task:{worker}", request)

    def _answer(self, asked: m.Join | m.Push | m.Pull | m.Assign | m.Probe) -> list[Reply]:
        """Returns the answer to a request that has been answered before."""
        return self.shard.answer(asked.worker, asked.incarnation, asked.request)

    # -- what differs between shard 0 and the others ------------------------------------------------------------------

    def _joined(self, got: Incoming[m.Join]) -> list[Reply]:
        return []  # the log says when it is answered

    def _pulled(self, pull: m.Pull) -> list[Reply]:
        return []

    def _assigning(self, got: Incoming[m.Assign]) -> list[Reply]:
        return []

    def _pushed_again(self, key: Key, request: int) -> None:
        """A gradient that was decided on is pushed again."""

    def _arrived(self, got: Incoming[m.Push], key: Key) -> list[Reply]:
        raise NotImplementedError

    def _probed(self, got: Incoming[m.Probe], key: Key | None) -> list[Reply]:
        raise NotImplementedError

    # -- time, disk, end ----------------------------------------------------------------------------------------------

    def before(self, message: m.AnyMessage) -> list[Reply]:
        """Does what has to be done before a message is handled."""
        return []

    def advance(self) -> list[Reply]:
        """Does what follows from what was handled."""
        return []

    def tick(self, now: float, wall: float) -> list[Reply]:
        """Time has passed."""
        raise NotImplementedError

    def break_off(self, why: str, now: float, wall: float) -> list[Reply]:
        """An update failed: whoever asks for something is told why, and the task ends when all have left."""
        self.shard.broken, self.broken = True, why
        self.life.say(why)
        return []

    def process_ended(self, worker: int, incarnation: int, now: float, wall: float) -> list[Reply]:
        """The process of a worker on this host is gone; shard 0 draws the consequences."""
        return []

    def stop(self, wall: float) -> list[Reply]:
        """Ends the run; only shard 0 can."""
        return []

    def _write_snapshots(self) -> None:
        """Hands the snapshots that the log has asked for to the saver."""
        for entry, snapshot in self.shard.snapshots:
            partial = locate(entry.partial)
            self.life.saver.write(entry.number, partial, self.shard.index, self.plan.num_shards, snapshot)
        self.shard.snapshots.clear()

    def _written(self) -> Iterator[m.Part | Published]:
        """Yields what the saver has finished: parts of this shard, and on shard 0 whole checkpoints."""
        for result in self.life.saver.results():
            if isinstance(result, Written):
                self.shard.snapshot_written()
            yield part_of(self.shard.index, result) if isinstance(result, Written) else result

    def commit(self) -> None:
        """Waits until the disk has the journal, where a run is to survive a loss of power."""
        if self.shard.journal is not None and self.shard.journal.uncommitted:
            self.shard.journal.commit()

    def discard(self) -> None:
        """Another ps has lost its variables: these go too, and all are restored together."""
        self.life.saver.drop_results()
        self.close()

    def give_up(self) -> None:
        """The task ends: what was begun on disk and cannot be completed is removed."""

    def close(self) -> None:
        """Releases memory and files."""
        self.shard.close()


class Following(Run):
    """A shard other than 0: it does what shard 0's log says."""

    def __init__(self, life: TaskLife, shard: Shard) -> None:
        super().__init__(life, shard)
        self.unconfirmed: m.Part | None = None  # a part of a checkpoint that shard 0 has not confirmed

    def log(self, got: Incoming[m.Log]) -> list[Reply]:
        """Shard 0 sends entries of its log."""
        if got.message.generation != self.generation:
            return []
        replies: list[Reply] = []
        for number, entry in enumerate(got.message.entries, got.message.first):
            if number == self.shard.followed:
                replies += self.shard.follow(entry)
        self._write_snapshots()
        return replies

    def tick(self, now: float, wall: float) -> list[Reply]:
        """Reports a written part to shard 0 until that confirms it; looks whether the journal is still there."""
        self._watch.check(now)
        for result in self._written():
            assert isinstance(result, m.Part), "only shard 0 publishes"
            self.unconfirmed = result
        return [Reply(LEADER, self.unconfirmed)] if self.unconfirmed is not None else []

    def _arrived(self, got: Incoming[m.Push], key: Key) -> list[Reply]:
        return [Reply(LEADER, self._have(key, got.message.request))]

    def _probed(self, got: Incoming[m.Probe], key: Key | None) -> list[Reply]:
        request = got.message.request
        hello = Reply(LEADER, self.life.me.shard_hello(self.generation, self.shard.followed, self.broken))
        if key is None:
            return [got.reply(m.Unknown(request, self.generation)), hello]
        return [got.reply(_elsewhere(request)), Reply(LEADER, self._have(key, request)), hello]

    def _have(self, key: Key, request: int) -> m.Have:
        """Returns what tells shard 0 that this shard holds its part of a gradient."""
        shard = self.shard
        return m.Have(
            shard.index, key.worker, key.incarnation, request, key.local_step, shard.followed, self.generation
        )


class Leading(Run):
    """Shard 0: it decides, saves, and holds what is the whole run's.

    Args:
        life: What the task has beyond this run.
        shard: The variables of shard 0.
        buffers: The model's buffers, if it has any.
        positions: Each worker's position in the checkpoint that the run goes on from.
    """

    def __init__(
        self, life: TaskLife, shard: Shard, buffers: BufferHome | None, positions: dict[str, dict[str, Any]]
    ) -> None:
        super().__init__(life, shard)
        ledger = open_ledger(self.plan.logdir, life.announce, life.clock)
        self.leader = Leader(self.plan, life.tally, ledger, shard.version, shard.update.settings)
        self.leader.scheduled_rates = lambda version: shard.update.rates_ahead(version - 1 - shard.version) or []
        self.buffers = buffers
        self.checkpoints = Checkpoints(
            self.leader, life.saver, life.announce, buffers=buffers, positions=positions, generation=self.generation
        )
        self.fastpath: FastPathHost | None = None
        if shard.page is not None:
            self.fastpath = FastPathHost(shard.page, shard, self.leader, lambda: self.checkpoints.busy)

    def status(self) -> dict[str, Any]:
        """Returns the state of the run for people and reports, and for those who wait for its last checkpoint."""
        checkpoints = self.checkpoints
        saved = {"saved_step": checkpoints.saved_version, "saved": checkpoints.last_good, "not_saved": checkpoints.lost}
        return {**self.leader.status(), **saved}

    def begin(self, data: dict[str, Any], replayed: list[Record], now: float, wall: float, *, save: bool) -> None:
        """Starts the run.

        Args:
            data: Which batches of shared data are in the checkpoint that the run goes on from.
            replayed: The updates that were made again from the journal.
            now: The time.
            wall: The time for people.
            save: Whether a first checkpoint has to be there before workers may join.
        """
        self.leader.history.restore(replayed)
        if replayed:
            self.checkpoints.restored_from(replayed[0].version - 1)
        self.leader.data.restore(data, (record.batches for record in replayed))
        self.leader.begin(wall)
        folder = locate(self.plan.logdir) if self.plan.logdir is not None else None
        if isinstance(folder, Path):
            with suppress(OSError):  # left by a run that was killed
                clear_left_behind(folder, clock=self.life.clock)
        if save:
            self.checkpoints.save_first(now)

    @property
    def admits(self) -> bool:
        """Whether workers may join now."""
        return not self.checkpoints.first_is_due

    @property
    def fastpath_is_open(self) -> bool:
        """Whether workers may be making updates by themselves now."""
        return self.fastpath is not None and self.fastpath.is_open

    # -- what workers send --------------------------------------------------------------------------------------------

    def push(self, got: Incoming[m.Push]) -> list[Reply]:
        """A joined worker sends a gradient, and with it, if it leads, the settings of its program."""
        self.leader.settings.check(got.message.settings)
        return super().push(got)

    def _joined(self, got: Incoming[m.Join]) -> list[Reply]:
        join = got.message
        transport = "shm" if join.gradients is not None else "tcp"
        self.leader.join(join.worker, join.incarnation, join.request, got.now, got.wall, transport)
        theirs = join.plan.last_step if join.plan is not None else None
        if theirs is not None and theirs != self.plan.last_step:
            ends = (
                f"ends at the chief's {self.plan.last_step}" if self.plan.last_step is not None else "has no last step"
            )
            self.life.say(
                f"/job:worker/task:{join.worker} has last_step={theirs}, which does not count: the run {ends}"
            )
        return []

    def _pushed_again(self, key: Key, request: int) -> None:
        self.leader.asked_again(key, request)

    def _arrived(self, got: Incoming[m.Push], key: Key) -> list[Reply]:
        push = got.message
        arrival = Arrival(push.version, push.loss, push.finite, push.settings)
        self.leader.arrived(0, key, push.request, got.now, got.wall, push=arrival)
        return []

    def _pulled(self, pull: m.Pull) -> list[Reply]:
        self.leader.pull(pull.worker, pull.incarnation, pull.request, averaged=pull.averaged, state=pull.state)
        return []

    def _assigning(self, got: Incoming[m.Assign]) -> list[Reply]:
        assign = got.message
        key = (assign.worker, assign.incarnation, assign.number)
        if assign.has_values and assign.variables and not self.shard.has_values(key, assign.variables):
            raise ValueError(f"no values were given for assignment {assign.number} of variables {assign.variables[:8]}")
        self.leader.assign(assign, got.wall)
        return []

    def _probed(self, got: Incoming[m.Probe], key: Key | None) -> list[Reply]:
        probe = got.message
        self.leader.quorum.seen(probe.worker, probe.incarnation, got.now)
        wait = self.leader.wait_of(probe.worker, probe.incarnation, probe.request)
        if wait is not None:
            wait.save = self.checkpoints.wants_position(probe.worker)
            return [got.reply(wait)]
        unknown = m.Unknown(probe.request, self.generation)
        return [got.reply(unknown if key is None else _elsewhere(probe.request))]

    def beat(self, got: Incoming[m.Beat]) -> list[Reply]:
        """A worker's sign of life."""
        beat, leader = got.message, self.leader
        leader.quorum.seen(beat.worker, beat.incarnation, got.now)
        leave = leader.membership.must_leave(beat.worker, beat.incarnation)
        return [got.reply(m.Alive(leader.quorum.version, leader.quorum.stopped, leader.lead, leave))]

    def leave(self, got: Incoming[m.Leave]) -> list[Reply]:
        """A worker leaves for good, with its results."""
        leave = got.message
        done = leave.finished or bool(self.broken)  # of a failed update everybody knows
        failed = "" if done else f"its program failed{': ' if leave.why else ''}{leave.why}"
        known = self.leader.quorum.workers.get(leave.worker)
        if known is not None and known.incarnation == leave.incarnation and not known.left:
            counts = self.life.tally.worker(leave.worker)
            counts.final_loss = leave.loss if leave.loss is not None else counts.final_loss
            counts.accuracy = leave.accuracy if leave.accuracy is not None else counts.accuracy
            self.life.ending.left(leave.worker, failed=failed)
            if leave.worker == 0 and leave.finished:
                self.checkpoints.chief_is_done(got.now)
        self.leader.leave(leave.worker, leave.incarnation, got.wall, failed=failed)
        self._check_end(got.now)
        return super().leave(got)

    def take_batches(self, got: Incoming[m.TakeBatches]) -> list[Reply]:
        """A joined worker asks for its share of the data."""
        take, known = got.message, self.leader.quorum.workers[got.message.worker]
        replies = self.look_at_fastpath(close=take.void > known.local_step)  # its next gradient will be refused
        answer = self.leader.take_batches(take, got.now, got.wall)
        if take.idle and not (answer.numbers or answer.over or answer.void):
            replies += self.look_at_fastpath(close=True)
            self.leader.pause(take.worker, take.incarnation, got.now, got.wall)
        return [*replies, got.reply(answer)]

    def take_buffers(self, got: Incoming[m.TakeBuffers]) -> list[Reply]:
        """A joined worker asks for the run's buffers."""
        quorum = self.leader.quorum
        return self._buffers().take(got.peer, got.message, quorum.version, got.now, quorum.alive)

    def receive_buffers(self, got: Incoming[m.Buffers]) -> list[Reply]:
        """A joined worker sends its buffers."""
        replies = self._buffers().receive(got.message, got.frames, got.now, self.leader.quorum.alive)
        if got.message.number < 0:
            self.checkpoints.buffers_received(got.message.worker)
        return replies

    def _buffers(self) -> BufferHome:
        if self.buffers is None:
            raise LostPlaceError(NO_BUFFERS)
        return self.buffers

    def _answer(self, asked: m.Join | m.Push | m.Pull | m.Assign | m.Probe) -> list[Reply]:
        return self._with_positions(super()._answer(asked), asked.worker)

    def _with_positions(self, replies: list[Reply], worker: int) -> list[Reply]:
        """Asks a worker for its position if it is wanted, and gives one that joins the position that was saved."""
        for reply in replies:
            if isinstance(answer := reply.message, m.Variables):
                answer.save = self.checkpoints.wants_position(worker)
                if self.shard.workers.is_join(worker, answer.request):
                    answer.position = self.checkpoints.restored_position(worker)
        return replies

    def hear_bytes(self, moved_bytes: Callable[[Peer], int], now: float) -> None:
        """Bytes that move are life: those of a gradient that is long on its way, or of an answer, may hold up the beats of its worker."""
        for worker, incarnation in self.shard.workers.heard_from(moved_bytes):
            known = self.leader.quorum.workers.get(worker)
            if known is not None and known.alive:
                self.leader.quorum.seen(worker, incarnation, now)

    # -- what other shards send ---------------------------------------------------------------------------------------

    def heard_of_shard(self, got: Incoming[m.Have | m.ShardHello]) -> list[Reply]:
        """Another shard is alive; with a Have, it holds its part of a gradient."""
        message, leader = got.message, self.leader
        leader.log.followed(message.shard, message.followed)
        if isinstance(message, m.Have):
            key = Key(message.worker, message.incarnation, message.local_step)
            leader.arrived(message.shard, key, message.request, got.now, got.wall)
        else:
            self.life.followers.sent[message.shard] = message.followed  # what it has not followed is sent again
            if message.broken:
                self.break_off(message.broken, got.now, got.wall)
        return [got.reply(m.Alive(leader.quorum.version, leader.quorum.stopped))]

    # -- the log and the fast path ------------------------------------------------------------------------------------

    def before(self, message: m.AnyMessage) -> list[Reply]:
        """Closes the fast path before a message that it cannot stand beside."""
        return self.look_at_fastpath(close=may_change(message, self.shard)) if self.fastpath_is_open else []

    def look_at_fastpath(self, *, close: bool) -> list[Reply]:
        """Takes over what workers have done on the fast path, and closes it with `close`."""
        if self.fastpath is None or not self.fastpath.is_open:
            return []
        made, unfinished = self.fastpath.close() if close else (self.fastpath.look(), [])
        self.fastpath.take_up(made, made=True)
        replies = self._follow_log(silent=True) if made else []
        # A round that was full and not published: the ps makes the update. What closed the fast path is still to come.
        self.fastpath.take_up(unfinished, made=False)
        return replies + (self._follow_log() if unfinished else [])

    def advance(self) -> list[Reply]:
        """Follows the log, sends it to the other shards, and opens the fast path when there is nothing to decide."""
        replies = self._follow_log()
        if self.fastpath is not None and self.fastpath.may_open():
            self.fastpath.open()
        return replies

    def _follow_log(self, *, silent: bool = False) -> list[Reply]:
        leader, shard, replies = self.leader, self.shard, list[Reply]()
        for note in leader.notes:
            self.life.say(note)
        leader.notes.clear()
        entries = leader.log.unseen_by(0)[1]
        if entries and shard.journal is not None:
            leader.history.flush()  # before the journal: what the variables have after a crash the ledger has too
        for entry in entries:
            if isinstance(entry, m.Release):
                answers = shard.follow(entry, leader.outcomes.get(entry.worker), silent=silent)
                replies += self._with_positions(answers, entry.worker)
            else:
                replies += shard.follow(entry)
        self._write_snapshots()
        replies += self.life.followers.news(leader.log, self.generation, shard.followed)
        leader.log.followed(0, shard.followed)
        return replies

    # -- time, disk, end ----------------------------------------------------------------------------------------------

    def tick(self, now: float, wall: float) -> list[Reply]:
        """Time has passed: checkpoints, deaths, the end of the job, the ledger's buffer."""
        leader, checkpoints = self.leader, self.checkpoints
        for result in self._written():
            if isinstance(result, Published):
                checkpoints.published(result, now)
            else:
                checkpoints.part(result)
        removed = self._watch.has_to_save(leader.history.losses, saving=checkpoints.busy)
        saves = checkpoints.busy or checkpoints.stands_in_now(now) or removed
        replies = self.look_at_fastpath(close=saves or leader.quorum.somebody_silent(now))
        checkpoints.advance(now, wall)
        self._give_up_on_silent_shards(now)
        leader.tick(now, wall)
        checkpoints.stand_in_for_chief(now)
        checkpoints.save_again(now, due=removed)
        self._check_end(now)
        leader.history.flush()
        if self.buffers is not None:
            replies += self.buffers.tick(now, leader.quorum.alive)
        return replies + self.advance()

    def _give_up_on_silent_shards(self, now: float) -> None:
        """A ps task that is gone writes no part: the checkpoint that waits for it is cancelled."""
        saving = self.checkpoints.saving
        missed = self.life.followers.missed(saving.parts, saving.begun_at, now) if saving is not None else None
        if missed is not None:
            self.checkpoints.fail(missed, now)

    def process_ended(self, worker: int, incarnation: int, now: float, wall: float) -> list[Reply]:
        """The process of a worker on this host is gone."""
        replies = self.look_at_fastpath(close=True)
        self.leader.lost(worker, incarnation, "its process ended", wall)
        self._check_end(now)
        return replies + self.advance()

    def stop(self, wall: float) -> list[Reply]:
        """Ends the run: every worker is released with the news."""
        replies = self.look_at_fastpath(close=True)
        if self.leader.quorum.stopped:
            self.checkpoints.hurry()
        self.leader.stop(wall)
        return replies + self.advance()

    def break_off(self, why: str, now: float, wall: float) -> list[Reply]:
        """An update failed, here or on another shard: the run stops, and nothing of it is saved any more."""
        if self.broken:
            return []
        super().break_off(f"{why}{self.checkpoints.name_last_good()}", now, wall)
        self.life.ending.lost = self.broken
        self.checkpoints.close()
        replies = self.stop(wall)
        self._check_end(now)
        return replies + self.advance()

    def _check_end(self, now: float) -> None:
        if self.shard.ended is None:
            self.life.ending.check(self.leader, self.checkpoints, now)

    def commit(self) -> None:
        """Waits until the disk has the ledger and the journal, where a run is to survive a loss of power."""
        if self.shard.uncommitted:
            self.leader.history.sync()
            super().commit()

    def discard(self) -> None:
        """Another ps has lost its variables: these go too, with an unpublished checkpoint, and all are restored together."""
        self.checkpoints.discard()
        self.life.followers.begin_again()
        super().discard()

    def give_up(self) -> None:
        """The task ends: an unpublished checkpoint is removed."""
        self.checkpoints.discard()

    def close(self) -> None:
        """Releases memory and files."""
        super().close()
        self.leader.history.close()


def _elsewhere(request: int) -> m.Held:
    return m.Held(request, "the other ps tasks", 0, 1, [])
