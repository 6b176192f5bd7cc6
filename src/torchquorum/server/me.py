"""Who a ps task is: its place in the cluster, its life, its host, and the ways in that it offers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from torchquorum.cluster import ClusterSpec, TaskId


@dataclass(frozen=True, kw_only=True)
class Me:
    """Who this ps task is."""

    cluster: ClusterSpec
    index: int
    incarnation: int
    host: str
    started_at: float
    door: str = ""
    lane: str = ""
    pid: int = field(default_factory=os.getpid)

    @property
    def task(self) -> TaskId:
        """Returns the task's name."""
        return TaskId("ps", self.index)
