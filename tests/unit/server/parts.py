"""What unit tests of the ps share: a plan for plain counting, and a task's identity."""

from __future__ import annotations

from typing import Any

from tests.protocol.by_hand import STARTED_AT, make_plan
from torchquorum.cluster import ClusterSpec
from torchquorum.server.arrivals import Arrival
from torchquorum.server.identity import Identity
from torchquorum.server.leader import Leader
from torchquorum.server.tally import Tally

WALL = 50.0


def identity(index: int = 0, ps: int = 2) -> Identity:
    """A ps task of a cluster with two workers."""
    hosts = {
        "ps": [f"localhost:{1000 + i}" for i in range(ps)],
        "worker": ["localhost:2000", "localhost:2001"],
    }
    return Identity(cluster=ClusterSpec(hosts), index=index, incarnation=77, host="here", started_at=STARTED_AT)


def leader(**changes: Any) -> Leader:
    """A leader whose workers 0 and 1 have joined, as incarnation 1 with request 1; its log is empty again."""
    made = Leader(make_plan(**changes), Tally(STARTED_AT), None)
    for worker in (0, 1):
        made.join(worker, 1, 1, 0.0, WALL, "tcp")
    made.log.entries.clear()
    made.notes.clear()
    return made


def push(version: int, loss: float | None = None, *, finite: bool = True) -> Arrival:
    """What comes with shard 0's part of a gradient."""
    return Arrival(version, loss, finite)
