"""What workers ask of shard 0: it hands their gradients to the leader, and has the run's buffers and their positions."""

from __future__ import annotations

from collections.abc import Callable

import torchquorum.wire.messages as m
from torchquorum.errors import LostPlaceError
from torchquorum.rules.quorum import Key
from torchquorum.server.arrivals import Arrival
from torchquorum.server.buffer_home import BufferHome
from torchquorum.server.checkpoints import Checkpoints
from torchquorum.server.leader import Leader
from torchquorum.server.reply import Incoming, Reply
from torchquorum.server.shard import Shard
from torchquorum.server.task_life import TaskLife
from torchquorum.server.worker_requests import WorkerRequests, held_elsewhere
from torchquorum.wire.channel import Peer

NO_BUFFERS = "holds no buffers of the model: only ps task 0 does, once the chief has created them"


class LeadingRequests(WorkerRequests):
    """Answers workers on shard 0.

    Args:
        life: What the task has beyond this run.
        shard: The variables of shard 0.
        leader: Decides about gradients.
        checkpoints: Know whose position is wanted, and where a worker stood in the checkpoint that was restored.
        buffers: The model's buffers, if it has any.

    Attributes:
        kept: How much of the generations before this one is in its past; a worker that comes back hears it.
    """

    def __init__(
        self, life: TaskLife, shard: Shard, leader: Leader, checkpoints: Checkpoints, buffers: BufferHome | None
    ) -> None:
        super().__init__(life.me, shard)
        self._say, self._leader, self._checkpoints, self._buffers = life.say, leader, checkpoints, buffers
        self.kept: list[tuple[int, int]] = []

    def push(self, got: Incoming[m.Push]) -> list[Reply]:
        """A joined worker sends a gradient, and with it, if it leads, the settings of its program."""
        push = got.message
        if 0 <= push.track < len(self._leader.settings):
            self._leader.settings[push.track].check(push.settings)
        return super().push(got)

    def _joined(self, got: Incoming[m.Join]) -> list[Reply]:
        join = got.message
        if (recorder := self._leader.effects.recorder) is not None:
            recorder.joined(join)
        transport = "shm" if join.gradients is not None else "tcp"
        self._leader.join(join.worker, join.incarnation, join.request, got.now, got.wall, transport, join.lost)
        theirs = join.plan.last_step if join.plan is not None else None
        if theirs is not None and theirs != self.plan.last_step:
            ends = (
                f"ends at the chief's {self.plan.last_step}" if self.plan.last_step is not None else "has no last step"
            )
            self._say(f"/job:worker/task:{join.worker} has last_step={theirs}, which does not count: the run {ends}")
        return []

    def _pushed_again(self, key: Key, push: m.Push) -> None:
        self._leader.asked_again(key, push.request, push.track)

    def _arrived(self, got: Incoming[m.Push], key: Key) -> list[Reply]:
        push = got.message
        arrival = Arrival(
            push.version, push.loss, push.finite, push.settings, push.norm, push.track, push.sample, push.of
        )
        self._leader.arrived(0, key, push.request, got.now, got.wall, push=arrival)
        return []

    def _pulled(self, pull: m.Pull) -> list[Reply]:
        self._leader.pull(pull.worker, pull.incarnation, pull.request, averaged=pull.averaged, state=pull.state)
        return []

    def _rows_asked(self, asked: m.PullRows) -> list[Reply]:
        if (recorder := self._leader.effects.recorder) is not None:
            recorder.asks_rows(asked, self.shard.row_requests.keys_of(asked))
        self._leader.rows_asked(0, asked.worker, asked.incarnation, asked.request)
        return []

    def _assigning(self, got: Incoming[m.Assign]) -> list[Reply]:
        assign = got.message
        key = (assign.worker, assign.incarnation, assign.number)
        tracks, first = (
            self.shard.tracks,
            m.TrackValues(assign.version, assign.variables, assign.state, assign.settings),
        )
        if len(assign.more) >= len(tracks):
            raise ValueError(f"an assignment to {len(assign.more) + 1} optimizers, the run has {len(tracks)}")
        for track, values in zip(tracks, [first, *assign.more], strict=False):
            gives = assign.has_values and (values.variables or values.state)
            if gives and not track.given.has(key, values.variables, state=values.state):
                raise ValueError(
                    f"no values were given for assignment {assign.number} of variables {values.variables[:8]}"
                )
            self._leader.settings[track.index].check(values.settings)
        self._leader.assigning.ask(assign, got.wall)
        return []

    def _probed(self, got: Incoming[m.Probe], key: Key | None) -> list[Reply]:
        probe = got.message
        self._leader.quorum.seen(probe.worker, probe.incarnation, got.now)
        wait = self._leader.wait_of(probe.worker, probe.incarnation, probe.request)
        if wait is not None:
            wait.save = self._checkpoints.wants_position(probe.worker)
            return [got.reply(wait)]
        unknown = m.Unknown(probe.request, self.generation)
        return [got.reply(unknown if key is None else held_elsewhere(probe.request))]

    def beat(self, got: Incoming[m.Beat]) -> list[Reply]:
        """A worker's sign of life."""
        beat, leader = got.message, self._leader
        leader.quorum.seen(beat.worker, beat.incarnation, got.now)
        leave = leader.membership.must_leave(beat.worker, beat.incarnation)
        return [got.reply(m.Alive(leader.quorum.version, leader.quorum.stopped, leader.lead, leave))]

    def take_buffers(self, got: Incoming[m.TakeBuffers]) -> list[Reply]:
        """A joined worker asks for the run's buffers."""
        quorum = self._leader.quorum
        return self._home().take(got.peer, got.message, quorum.version, got.now, quorum.alive)

    def receive_buffers(self, got: Incoming[m.Buffers]) -> list[Reply]:
        """A joined worker sends its buffers."""
        replies = self._home().receive(got.message, got.frames, got.now, self._leader.quorum.alive)
        if got.message.number < 0:
            self._checkpoints.positions.buffers_received(got.message.worker)
        return replies

    def _home(self) -> BufferHome:
        if self._buffers is None:
            raise LostPlaceError(NO_BUFFERS)
        return self._buffers

    def _answer(self, asked: m.Join | m.Push | m.Pull | m.Assign | m.Probe) -> list[Reply]:
        return self.with_positions(super()._answer(asked), asked.worker)

    def with_positions(self, replies: list[Reply], worker: int) -> list[Reply]:
        """Asks a worker for its position if it is wanted, and gives one that joins the position that was saved."""
        for reply in replies:
            if isinstance(answer := reply.message, m.Variables):
                answer.save = self._checkpoints.wants_position(worker)
                answer.pace_s = self._leader.history.pace_s(self._leader.quorum.alive, answer.track)
                if self.shard.workers.is_join(worker, answer.request):
                    answer.position, answer.kept = self._checkpoints.positions.restored(worker), self.kept
                    if (recorder := self._leader.effects.recorder) is not None and answer.position is not None:
                        recorder.placed(worker, self.shard.workers[worker].incarnation, answer.position)
        return replies

    def hear_bytes(self, moved_bytes: Callable[[Peer], int], now: float) -> None:
        """Bytes that move are life: those of a gradient that is long on its way, or of an answer, may hold up the beats of its worker."""
        for worker, incarnation in self.shard.workers.heard_from(moved_bytes):
            known = self._leader.quorum.workers.get(worker)
            if known is not None and known.alive:
                self._leader.quorum.seen(worker, incarnation, now)
