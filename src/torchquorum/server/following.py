"""The run on a shard other than 0: it does what shard 0's log says, and tells shard 0 of the gradients that it holds."""

from __future__ import annotations

from collections.abc import Callable

import torchquorum.wire.messages as m
from torchquorum.rules.quorum import Key
from torchquorum.server.identity import Identity
from torchquorum.server.reads import Reads
from torchquorum.server.reply import LEADER, Incoming, Reply
from torchquorum.server.run import Run
from torchquorum.server.shard import Shard
from torchquorum.server.task_life import TaskLife
from torchquorum.server.worker_requests import WorkerRequests, held_elsewhere


class FollowingRequests(WorkerRequests):
    """Keeps what workers send, and tells shard 0 of it. The log says when they are answered."""

    def __init__(self, me: Identity, shard: Shard, broken: Callable[[], str]) -> None:
        super().__init__(me, shard)
        self._broken = broken  # why an update could not be made, if so

    def _arrived(self, got: Incoming[m.Push], key: Key) -> list[Reply]:
        return [Reply(LEADER, self._have(key, got.message.request))]

    def _probed(self, got: Incoming[m.Probe], key: Key | None) -> list[Reply]:
        request = got.message.request
        hello = Reply(LEADER, self.me.shard_hello(self.generation, self.shard.followed, self._broken()))
        if key is None:
            return [got.reply(m.Unknown(request, self.generation)), hello]
        return [got.reply(held_elsewhere(request)), Reply(LEADER, self._have(key, request)), hello]

    def _rows_asked(self, asked: m.PullRows) -> list[Reply]:
        shard = self.shard
        who = asked.worker, asked.incarnation, asked.request
        return [Reply(LEADER, m.HaveKeys(shard.index, *who, shard.followed, self.generation))]

    def _have(self, key: Key, request: int) -> m.Have:
        """Returns what tells shard 0 that this shard holds its part of a gradient."""
        shard = self.shard
        return m.Have(
            shard.index, key.worker, key.incarnation, request, key.local_step, shard.followed, self.generation
        )


class Following(Run):
    """A shard other than 0."""

    def __init__(self, life: TaskLife, shard: Shard) -> None:
        super().__init__(life, shard, FollowingRequests(life.me, shard, lambda: self.broken), Reads(shard))
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
        unconfirmed = [Reply(LEADER, self.unconfirmed)] if self.unconfirmed is not None else []
        return [*unconfirmed, *self.reads.tick(now)]
