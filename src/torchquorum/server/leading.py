"""The run on shard 0: it decides, saves, and holds what is the whole run's.

What always holds: what closes the fast path is handled after what workers did on it; the log is followed before anything is
answered.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torchquorum.wire.messages as m
from torchquorum.errors import UpdateError
from torchquorum.fastpath.host import FastPathHost, may_change
from torchquorum.formats.checkpoint_write import clear_left_behind
from torchquorum.formats.journal import Record
from torchquorum.formats.ledger_write import open_ledger
from torchquorum.formats.repeated_failure import RepeatedFailure
from torchquorum.formats.storage import locate
from torchquorum.memory.resident import resident_bytes
from torchquorum.rules.quorum import Key
from torchquorum.server.barrier_waits import SAVED_AS
from torchquorum.server.buffer_home import BufferHome
from torchquorum.server.checkpoints import Checkpoints
from torchquorum.server.leader import Leader
from torchquorum.server.leading_reads import LeadingReads
from torchquorum.server.leading_requests import LeadingRequests
from torchquorum.server.recorder import open_recorder
from torchquorum.server.reply import Incoming, Reply
from torchquorum.server.run import Run
from torchquorum.server.run_status import describe_run
from torchquorum.server.saver import Published
from torchquorum.server.shard import Shard
from torchquorum.server.task_life import TaskLife


class Leading(Run):
    """Shard 0.

    Args:
        life: What the task has beyond this run.
        shard: The variables of shard 0.
        buffers: The model's buffers, if it has any.
        positions: Each worker's position in the checkpoint that the run goes on from.
    """

    requests: LeadingRequests
    reads: LeadingReads

    def __init__(
        self, life: TaskLife, shard: Shard, buffers: BufferHome | None, positions: dict[str, dict[str, Any]]
    ) -> None:
        plan = shard.plan
        self.leader = Leader(
            plan,
            life.tally,
            open_ledger(plan.logdir, life.announce, life.clock),
            [track.version for track in shard.tracks],
            [track.variables.update.settings for track in shard.tracks],
        )
        self.leader.effects.scheduled_rates = lambda k, version: (
            shard.tracks[k].variables.update.rates.ahead(version - 1 - shard.tracks[k].version) or []
        )
        self.buffers = buffers
        self.recorder = self.leader.effects.recorder = open_recorder(plan, life.announce)
        if self.recorder is not None and buffers is not None:
            buffers.given = self.recorder.gave_buffers
        self.checkpoints = Checkpoints(
            self.leader, life.saver, life.announce, buffers=buffers, positions=positions, generation=shard.generation
        )
        self._silence = RepeatedFailure(life.announce, life.clock)
        requests = LeadingRequests(life, shard, self.leader, self.checkpoints, buffers)
        super().__init__(life, shard, requests, LeadingReads(shard, self.leader, buffers))
        self.fastpaths = [
            FastPathHost(track.page, track, self.leader, self._has_to_decide, track=track.index, journal=shard.journal)
            for track in shard.tracks
            if track.page is not None
        ]

    def _has_to_decide(self) -> bool:
        """Whether workers have to come to the ps for every step now: something is saved, or the job ends."""
        return self.checkpoints.busy or self.shard.ended is not None

    def status(self) -> dict[str, Any]:
        """Returns the state of the run for people and reports, and for those who wait for its last checkpoint."""
        checkpoints = self.checkpoints
        newest = checkpoints.newest
        saved = {"saved_step": newest.version, "saved": newest.path, "not_saved": checkpoints.lost}
        use = {"memory_bytes": resident_bytes(), "moved_bytes": self.shard.workers.moved_bytes}
        return {**describe_run(self.leader), **saved, **use, **self.reads.status(), "logdir": self.plan.logdir}

    def begin(
        self, data: dict[str, Any], replayed: list[Record], now: float, wall: float, *, step: int, save: bool
    ) -> None:
        """Starts the run.

        Args:
            step: The global step of the checkpoint that the run goes on from; 0 without one.
            data: Which batches of shared data are in the checkpoint that the run goes on from.
            replayed: The updates that were made again from the journal.
            now: The time.
            wall: The time for people.
            save: Whether a first checkpoint has to be there before workers may join.
        """
        self.leader.history.restore(replayed)
        if replayed:
            self.checkpoints.restored_from(step, replayed[0].number)
        self.leader.barrier_waits.barriers.restore(data.get(SAVED_AS, {}))
        data = {name: body for name, body in data.items() if name != SAVED_AS}
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
        return any(fastpath.is_open for fastpath in self.fastpaths)

    def leave(self, got: Incoming[m.Leave]) -> list[Reply]:
        """A worker leaves for good, with its results."""
        leave = got.message
        known = self.broken or (self.plan.must_save and self.checkpoints.lost)  # of what ends the run everybody knows
        done = leave.finished or bool(known)
        failed = "" if done else f"its program failed{': ' if leave.why else ''}{leave.why}"
        worker = self.leader.quorum.workers.get(leave.worker)
        if worker is not None and worker.incarnation == leave.incarnation and not worker.left:
            counts = self.life.tally.worker(leave.worker)
            counts.final_loss = leave.loss if leave.loss is not None else counts.final_loss
            counts.accuracy = leave.accuracy if leave.accuracy is not None else counts.accuracy
            self.life.ending.left(leave.worker, failed=failed)
            if leave.worker == 0 and leave.finished:
                self.checkpoints.stand_in.saved(got.now)
        self.leader.leave(leave.worker, leave.incarnation, got.wall, failed=failed)
        if leave.worker == 0:
            self.leader.conclude(got.wall)
        self._check_end(got.now)
        return super().leave(got)

    def at_barrier(self, got: Incoming[m.AtBarrier]) -> list[Reply]:
        """A worker has come to the end of an epoch, or to a barrier."""
        asked = got.message
        replies = self.look_at_fastpath(close=asked.wait)
        status = self.leader.barrier_waits.wait(asked, got.now, got.wall)
        if self.recorder is not None:
            self.recorder.opened(asked, status)
        return [*replies, got.reply(status)]

    def take_batches(self, got: Incoming[m.TakeBatches]) -> list[Reply]:
        """A joined worker asks for its share of the data."""
        take, known = got.message, self.leader.quorum.workers[got.message.worker]
        void = take.void > known.local_step  # its next gradient will be refused
        replies = self.look_at_fastpath(close=void or bool(self.plan.durable))
        answer = self.leader.take_batches(take, got.now, got.wall)
        if take.idle and not (answer.numbers or answer.over or answer.void):
            replies += self.look_at_fastpath(close=True)
            self.leader.pause(take.worker, take.incarnation, got.now, got.wall)
        return [*replies, got.reply(answer)]

    def heard_of_shard(self, got: Incoming[m.Have | m.HaveKeys | m.HaveRead | m.ShardHello]) -> list[Reply]:
        """Another shard is alive; with a Have, it holds its part of a gradient, with HaveKeys it knows which rows are wanted of it.

        With HaveRead it knows what a reader asks it for.
        """
        message, leader = got.message, self.leader
        leader.log.followed(message.shard, message.followed)
        if isinstance(message, m.Have):
            key = Key(message.worker, message.incarnation, message.local_step)
            leader.arrived(message.shard, key, message.request, got.now, got.wall)
        elif isinstance(message, m.HaveKeys):
            leader.rows_asked(message.shard, message.worker, message.incarnation, message.request)
        elif isinstance(message, m.HaveRead):
            self.reads.told(message.shard, message.reader, message.request)
        else:
            self.life.followers.sent[message.shard] = message.followed  # what it has not followed is sent again
            if message.broken:
                self.break_off(message.broken, got.now, got.wall)
        return [got.reply(m.Alive(leader.quorum.version, leader.quorum.stopped))]

    def before(self, message: m.AnyMessage) -> list[Reply]:
        """Closes the fast path before a message that it cannot stand beside; for a gradient, that of its optimizer."""
        if not self.fastpath_is_open:
            return []
        changes = may_change(message, self.shard)
        return self.look_at_fastpath(close=changes, track=message.track if isinstance(message, m.Push) else None)

    def look_at_fastpath(self, *, close: bool, track: int | None = None) -> list[Reply]:
        """Takes over what workers have done on the fast path, and closes it with `close`, or only that of one track."""
        replies: list[Reply] = []
        for fastpath in self.fastpaths:
            if fastpath.is_open:
                closes = close and track in (None, fastpath.track)
                made, unfinished = fastpath.close() if closes else (fastpath.look(), [])
                fastpath.take_up(made, made=True)
                replies += self._follow_log(silent=True) if made else []
                if closes:
                    fastpath.take_journal()
                # A round that was full and not published: the ps makes the update. What closed the fast path is still to come.
                fastpath.take_up(unfinished, made=False)
                replies += self._follow_log() if unfinished else []
        return replies

    def advance(self) -> list[Reply]:
        """Follows the log, sends it to the other shards, and opens the fast path when there is nothing to decide."""
        replies = self._follow_log()
        for fastpath in self.fastpaths:
            if fastpath.may_open():
                fastpath.open()
        if self.recorder is not None:
            self.recorder.flush()  # before any reply leaves
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
                answers = shard.follow(entry, leader.effects.outcomes.get(entry.worker), silent=silent)
                replies += self.requests.with_positions(answers, entry.worker)
            else:
                replies += shard.follow(entry)
        for track in shard.tracks:
            if track.evicted:
                naming = self.plan.naming(track.index)
                leader.history.note("evicted", values={"rows": track.evicted, "step": track.version, **naming})
                track.evicted = 0
        self._write_snapshots()
        replies += self.life.followers.news(leader.log, self.generation, shard.followed)
        leader.log.followed(0, shard.followed)
        return replies

    def tick(self, now: float, wall: float) -> list[Reply]:
        """Time has passed: checkpoints, deaths, the end of the job, the ledger's buffer."""
        leader, checkpoints = self.leader, self.checkpoints
        if (taken_by := leader.history.taken_by) and not self.broken:
            raise UpdateError(
                f"{self.life.me.task}: another run has taken {self.plan.logdir} over ({taken_by}), perhaps while this one was paused: it "
                "ends here, and saves nothing any more. Let one of the two go on, or give each a folder of its own"
            )
        for result in self._written():
            if isinstance(result, Published):
                checkpoints.published(result, now)
            else:
                checkpoints.part(result)
        removed = self._watch.has_to_save(leader.history.losses, saving=checkpoints.busy)
        saves = checkpoints.busy or checkpoints.stand_in.is_due(now) or removed
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
        replies += self.reads.tick(now)
        return replies + self.advance()

    def _give_up_on_silent_shards(self, now: float) -> None:
        """A ps task that is gone writes no part: the checkpoint that waits for it is cancelled."""
        saving = self.checkpoints.saving
        missed = self.life.followers.missed(saving.parts, saving.begun_at, now) if saving is not None else None
        if missed is None:
            self._silence.over("all ps tasks are heard of again")
        elif missed.is_late:  # with one that is gone its variables are, too: the same checkpoint is not tried again
            self.checkpoints.fail(f"{missed.why}; start it again", None if missed.is_gone else now)
        else:
            self._silence.tell(f"{missed.why}: its part of a checkpoint is waited for")

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
            self.life.ending.check(self.leader, self.checkpoints, now, comes_back=not self.life.me.alone)

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
        if self.recorder is not None:
            self.recorder.close()
