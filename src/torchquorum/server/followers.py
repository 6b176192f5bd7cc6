"""The other ps tasks as shard 0 sees them: where they are, what of the log they have, and who has gone silent.

Owned by the service of shard 0, and used by each run. What always holds: a shard is sent each entry of the log at least once,
in order; one that reports fewer entries than it was sent is sent the rest again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass

import torchquorum.wire.messages as m
from torchquorum.cluster import TaskId
from torchquorum.server.decision_log import DecisionLog
from torchquorum.server.identity import Identity
from torchquorum.server.reply import Reply
from torchquorum.wire.channel import Peer

SILENCE_S = 600.0  # it may only be paused: as long as no worker need be alive
ASK_S = 10.0  # then its host is asked whether it is gone, and again as often


@dataclass(frozen=True, slots=True)
class MissedPart:
    """A part of a checkpoint that does not come.

    Attributes:
        why: Who is silent, and for how long.
        is_gone: Whether its process has ended, as its host says, or is another: what it held will not come back.
        is_late: Whether it is waited for no more.
    """

    why: str
    is_gone: bool
    is_late: bool


class Followers:
    """What shard 0 knows of the others.

    Attributes:
        refuses: Whether nobody listens at an address, as its host says.
        sent: How much of the log each was sent.
        elsewhere: Those whose last word was of another creation of the variables: they do not follow this log.
        left: Those that have heard that the job is over, and end.
    """

    def __init__(self, me: Identity) -> None:
        self._me = me
        self._peers: dict[int, Peer] = {}
        self._newest: dict[int, Peer] = {}  # also of those that are elsewhere
        self._ended: tuple[int, DecisionLog] | None = None
        self.elsewhere: set[int] = set()
        self.left: set[int] = set()
        self._heard: dict[int, float] = {}
        self.refuses: Callable[[str], bool] = lambda _: False
        self._gone: set[int] = set()
        self._asked_at = -math.inf
        self.sent: dict[int, int] = {}

    def begin_again(self) -> None:
        """The log begins anew, after a restore."""
        self.sent.clear()

    def job_is_over(self, generation: int, log: DecisionLog) -> None:
        """Another job may begin; who has not heard of the end of this one is still told of it."""
        self._ended = generation, log

    def say_over(self) -> list[Reply]:
        """Returns what tells every shard that has been heard of, and has not answered yet, that no other job will come."""
        return [Reply(peer, m.Over()) for shard, peer in self._newest.items() if shard not in self.left]

    def still_to_follow(self, shard: int, generation: int) -> m.Log | None:
        """Returns what a shard lacks of the log of a job that was over, if it is still in that."""
        if self._ended is None or self._ended[0] != generation or shard not in self._ended[1].behind():
            return None
        return m.Log(generation, *self._ended[1].unseen_by(shard))

    def hear(
        self,
        peer: Peer,
        message: m.Have | m.HaveKeys | m.HaveRead | m.ShardHello,
        generation: int,
        log_ends: int | None,
        now: float,
    ) -> m.Message | None:
        """Notes that a shard lives; returns what to answer instead of going on, if it is not one of ours now.

        Without a run there is no log, and `log_ends` is None.

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
        self._newest[message.shard] = peer
        if isinstance(message, m.ShardHello) and message.over:
            self.left.add(message.shard)
        if log_ends is None or message.generation != generation:  # of before a restore, or ahead of ours
            self.elsewhere.add(message.shard)
            return self.still_to_follow(message.shard, message.generation) or m.Alive(0, False)
        self.elsewhere.discard(message.shard)
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

    def missed(self, parts: Container[int], since: float, now: float) -> MissedPart | None:
        """Returns which shard owes its part of a checkpoint, begun at `since`, and is silent; None if none is."""
        for shard in range(1, self._me.cluster.num_tasks("ps")):
            silent_s = now - max(self._heard.get(shard, 0.0), since)
            if shard not in parts and silent_s > min(ASK_S, SILENCE_S):
                address = self._me.cluster.address(TaskId("ps", shard))
                if now - self._asked_at > ASK_S and shard not in self._gone:
                    self._asked_at = now
                    self._gone |= {shard} if self.refuses(address) else set()
                why = f"{TaskId('ps', shard)} ({address}) has not been heard of for {silent_s:.0f} s"
                is_gone = shard in self._gone or shard in self.elsewhere  # without what it held, either way
                return MissedPart(why, is_gone, is_gone or silent_s > SILENCE_S)
            if shard not in parts:
                self._gone.discard(shard)
        return None
