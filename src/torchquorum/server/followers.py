"""The other ps tasks as shard 0 sees them: where they are, what of the log they have, and who has gone silent.

Owned by the service of shard 0, and used by each run. What always holds: a shard is sent each entry of the log at least once,
in order; one that reports fewer entries than it was sent is sent the rest again.
"""

from __future__ import annotations

from collections.abc import Container

import torchquorum.wire.messages as m
from torchquorum.cluster import TaskId
from torchquorum.server.decision_log import DecisionLog
from torchquorum.server.identity import Identity
from torchquorum.server.reply import Reply
from torchquorum.wire.channel import Peer

SILENCE_S = 600.0  # it may only be paused: as long as no worker need be alive


class Followers:
    """What shard 0 knows of the others."""

    def __init__(self, me: Identity) -> None:
        self._me = me
        self._peers: dict[int, Peer] = {}
        self._heard: dict[int, float] = {}
        self.sent: dict[int, int] = {}

    def begin_again(self) -> None:
        """The log begins anew, after a restore."""
        self.sent.clear()

    def hear(
        self, peer: Peer, message: m.Have | m.HaveKeys | m.ShardHello, generation: int, log_ends: int, now: float
    ) -> m.Message | None:
        """Notes that a shard lives; returns what to answer instead of going on, if it is not one of ours now.

        Raises:
            ValueError: The message makes no sense.
        """
        count = self._me.cluster.num_tasks("ps")
        if self._me.index != 0:
            raise ValueError("only shard 0 hears of other shards")
        if not 0 < message.shard < count:
            raise ValueError(f"shard {message.shard}: the cluster has {count} ps tasks")
        if isinstance(message, m.ShardHello) and message.protocol != m.PROTOCOL:
            shard = str(TaskId("ps", message.shard))
            text = m.refuse_protocol(shard, message.protocol, message.package, str(self._me.task))
            return m.Fault("protocol", text)
        if message.generation != generation:
            return m.Alive(0, False)  # of before a restore, or ahead of ours
        if not 0 <= message.followed <= log_ends:
            raise ValueError(f"shard {message.shard} has followed {message.followed} entries, more than the log has")
        self._peers[message.shard] = peer
        self._heard[message.shard] = now
        return None

    def news(self, log: DecisionLog, generation: int, end: int) -> list[Reply]:
        """Returns what each shard has not been sent of the first `end` entries of the log."""
        replies = []
        for shard, peer in self._peers.items():
            first, entries = log.unseen_by(shard)
            sent = max(first, min(self.sent.get(shard, 0), end))
            if sent < end:
                replies.append(Reply(peer, m.Log(generation, sent, entries[sent - first :])))
                self.sent[shard] = end
        return replies

    def missed(self, parts: Container[int], since: float, now: float) -> str | None:
        """Returns which shard owes its part of a checkpoint, begun at `since`, and is silent; None if none is."""
        for shard in range(1, self._me.cluster.num_tasks("ps")):
            silent_s = now - max(self._heard.get(shard, 0.0), since)
            if shard not in parts and silent_s > SILENCE_S:
                task = TaskId("ps", shard)
                where = f"{task} ({self._me.cluster.address(task)})"
                return f"{where} has not been heard of for {silent_s:.0f} s; start it again"
        return None
