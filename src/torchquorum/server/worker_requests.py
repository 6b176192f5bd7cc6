"""What joined workers ask of a ps task: to join, to push, to pull, to assign. `Run` has one, which is of its kind.

Called with what `routes` has checked. What always holds: a request that has been answered is answered again with the same
version; a gradient that has been decided on is not stored again.
"""

from __future__ import annotations

import torchquorum.wire.messages as m
from torchquorum.errors import ConfigError
from torchquorum.rules.quorum import Key
from torchquorum.server.buffer_home import check_same_buffers
from torchquorum.server.identity import Identity
from torchquorum.server.plan_difference import check_same_plan
from torchquorum.server.reply import Incoming, Reply
from torchquorum.server.shard import Shard
from torchquorum.server.shard_track import ShardTrack


class WorkerRequests:
    """Answers workers, as far as every shard does it alike."""

    def __init__(self, me: Identity, shard: Shard) -> None:
        self.me, self.shard, self.plan, self.generation = me, shard, shard.plan, shard.generation

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
        push = got.message
        track = self.track(push.track)
        gradients = track.gradients
        self.shard.workers[push.worker].revisions[push.track] = push.revision
        if answer := self._answer(push):
            return answer
        key = Key(push.worker, push.incarnation, push.local_step)
        if gradients.is_decided(key):
            self._pushed_again(key, push)
            return []
        if key not in gradients:
            track.store(push, got.frames)
        gradients.note_request(push.request, key)
        return self._arrived(got, key)

    def pull_rows(self, got: Incoming[m.PullRows]) -> list[Reply]:
        """A joined worker asks for rows of a table."""
        asked, track = got.message, self.track(got.message.track)
        if len(got.frames) != (expected := int(asked.since < 0 and asked.at < 0)):
            raise ValueError(f"{len(got.frames)} frames of keys, expected {expected}")
        if asked.request < self.shard.workers[asked.worker].join_request:
            return []  # from before it joined again, with other memory
        keys, memory = got.frames[0] if got.frames else b"", track.workers.rows_of(asked.worker)
        return self.shard.row_requests.ask(got.peer, asked, keys, track.tables, memory) or self._rows_asked(asked)

    def pull(self, got: Incoming[m.Pull]) -> list[Reply]:
        """A joined worker asks for the current version."""
        if got.message.averaged and all(track.variables.averages is None for track in self.shard.tracks):
            raise ConfigError(
                "no moving averages are kept; give tq.Optimizer an average=tq.ExponentialMovingAverage(0.99)"
            )
        return self._answer(got.message) or self._pulled(got.message)

    def keep_values(self, got: Incoming[m.Values]) -> list[Reply]:
        """A joined worker sends values that it is about to assign."""
        values = got.message
        track, expected = self.track(values.track), bool(values.variables) + (values.optimizer is not None)
        known = all(0 <= v < len(track.plan.variables) for v in values.variables)
        if len(got.frames) != max(1, expected) or not known:
            raise ValueError(f"values of variables {values.variables[:8]} with {len(got.frames)} frames make no sense")
        track.keep_values(values, got.frames)
        return [got.reply(m.ValuesKept(values.number))]

    def assign(self, got: Incoming[m.Assign]) -> list[Reply]:
        """A joined worker has come to an assignment."""
        return self._answer(got.message) or self._assigning(got)

    def probe(self, got: Incoming[m.Probe]) -> list[Reply]:
        """A worker has had no answer to a request: it gets it again, or what it waits for."""
        probe = got.message
        if answer := self._answer(probe):
            return answer
        return self._probed(got, self.shard.gradient_of(probe.worker, probe.incarnation, probe.request))

    def not_joined(self, worker: int, incarnation: int, request: int = -1) -> m.Fault:
        """Returns the answer to a process that speaks as a worker and has not joined as it, or was replaced."""
        task = self.me.task
        if self.shard.workers.replaced(worker, incarnation):
            text = (
                f"{task} has let a newer process in as /job:worker/task:{worker}, so this one is out. "
                "Start each worker once, with an index of its own."
            )
            return m.Fault("replaced", text, request)
        return m.Fault("LostPlaceError", f"{task} does not know this process as /job:worker/task:{worker}", request)

    def track(self, index: int) -> ShardTrack:
        """Returns what there is for an optimizer that a worker names."""
        if not 0 <= index < len(self.shard.tracks):
            raise ValueError(f"optimizer {index}: the run has {len(self.shard.tracks)}")
        return self.shard.tracks[index]

    def _answer(self, asked: m.Join | m.Push | m.Pull | m.Assign | m.Probe) -> list[Reply]:
        """Returns the answer to a request that has been answered before."""
        return self.shard.answer(asked.worker, asked.incarnation, asked.request)

    # -- what differs between shard 0 and the others ------------------------------------------------------------------

    def _joined(self, got: Incoming[m.Join]) -> list[Reply]:
        return []  # the log says when it is answered

    def _pulled(self, pull: m.Pull) -> list[Reply]:
        return []

    def _rows_asked(self, asked: m.PullRows) -> list[Reply]:
        raise NotImplementedError

    def _assigning(self, got: Incoming[m.Assign]) -> list[Reply]:
        return []

    def _pushed_again(self, key: Key, push: m.Push) -> None:
        """A gradient that was decided on is pushed again."""

    def _arrived(self, got: Incoming[m.Push], key: Key) -> list[Reply]:
        raise NotImplementedError

    def _probed(self, got: Incoming[m.Probe], key: Key | None) -> list[Reply]:
        raise NotImplementedError


def held_elsewhere(request: int) -> m.Held:
    """Returns what a worker waits for whose gradient is here: the other ps tasks."""
    return m.Held(request, "the other ps tasks", 0, 1, [])
