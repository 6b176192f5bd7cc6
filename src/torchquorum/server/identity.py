"""Who a ps task is: its place in the cluster, its life, its host, and the transports that it offers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.wire.messages import PACKAGE, PROTOCOL, ShardHello, Way, Welcome


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who this ps task is.

    Attributes:
        alone: Whether its one worker is in this process: one that has left by an error is not waited for.
    """

    cluster: ClusterSpec
    index: int
    incarnation: int
    host: str
    started_at: float
    ways: tuple[Way, ...] = ()
    pid: int = field(default_factory=os.getpid)
    alone: bool = False

    @property
    def task(self) -> TaskId:
        """Returns the task's name."""
        return TaskId("ps", self.index)

    def welcome(self, generation: int | None) -> Welcome:
        """Returns the answer to a task's greeting; `generation` is the creation of the variables, None if there are none."""
        ways, created = list(self.ways), generation is not None
        who = PROTOCOL, str(self.task), self.incarnation, self.host, self.pid
        return Welcome(*who, created, PACKAGE, ways, generation or 0)

    def shard_hello(self, generation: int, followed: int, broken: str = "", *, over: bool = False) -> ShardHello:
        """Returns what a shard tells shard 0 now and then: that it lives, and how much of the log it has followed."""
        place = self.pid, self.host, generation
        return ShardHello(self.index, self.incarnation, followed, *place, PROTOCOL, PACKAGE, broken, over)
