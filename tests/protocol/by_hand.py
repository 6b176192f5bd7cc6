"""Ps tasks without threads, sockets or a clock: tests hand them messages and look at what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

import torchquorum as tq
import torchquorum.wire.messages as m
from torchquorum.cluster import ClusterSpec
from torchquorum.memory.slots import section_views
from torchquorum.placement.layout import Layout, Variable, place
from torchquorum.server.following import Following
from torchquorum.server.identity import Identity
from torchquorum.server.leading import Leading
from torchquorum.server.reply import Reply
from torchquorum.server.saving import Saving
from torchquorum.server.service import Service
from torchquorum.server.shard import Shard
from torchquorum.wire import codec

M = TypeVar("M", bound=m.Message)
STARTED_AT = 1_000_000.0
VARIABLES = [
    Variable(name="w", shape=(4, 5), dtype="float32"),
    Variable(name="b", shape=(5,), dtype="float32"),
    Variable(name="table", shape=(3,), dtype="int64", group=-1),
]


def make_plan(**changes: Any) -> m.Plan:
    """A plan for plain counting: SGD with rate 1."""
    given: dict[str, Any] = {
        "variables": VARIABLES,
        "optimizer": m.OptimizerSpec("SGD", [{"lr": 1.0}]),
        "rule": tq.Sync(),
        "num_shards": 1,
        "num_workers": 2,
        "liveness_s": 5.0,
    }
    return m.Plan(**{**given, **changes})


def layout_of(plan: m.Plan) -> Layout:
    """Where the variables of a plan lie."""
    return place(plan.variables, plan.num_shards, strategy=plan.placement, slice_bytes=plan.slice_bytes)


class Ps:
    """One ps task, with a clock that the test sets."""

    def __init__(self, index: int = 0, ps: int = 1, workers: int = 2) -> None:
        cluster = ClusterSpec(
            {
                "ps": [f"localhost:{1000 + i}" for i in range(ps)],
                "worker": [f"localhost:{2000 + i}" for i in range(workers)],
            }
        )
        self.said: list[str] = []
        me = Identity(cluster=cluster, index=index, incarnation=77, host="here", started_at=STARTED_AT)
        self.service = Service(me, self.said.append)
        self.now = 100.0
        self.plan = make_plan(num_shards=ps, num_workers=workers)

    @property
    def index(self) -> int:
        """Which ps task this is."""
        return self.service.life.me.index

    @property
    def run(self) -> Leading:
        """The run of shard 0, which the chief has created."""
        assert isinstance(self.service.run, Leading)
        return self.service.run

    @property
    def shard(self) -> Shard:
        """The variables, which the chief has created."""
        assert self.service.run is not None
        return self.service.run.shard

    @property
    def saving(self) -> Saving:
        """The checkpoint that is being made."""
        assert self.run.checkpoints.saving is not None
        return self.run.checkpoints.saving

    @property
    def unconfirmed(self) -> m.Part | None:
        """The part of a checkpoint that a shard other than 0 goes on telling of."""
        assert isinstance(self.service.run, Following)
        return self.service.run.unconfirmed

    @property
    def wall(self) -> float:
        """The clock on the wall, which runs with the other."""
        return STARTED_AT + self.now

    def send(self, peer: bytes, message: m.Message, *frames: bytes) -> list[Reply]:
        """Hands over a message and returns the replies."""
        return self.service.handle(peer, [codec.encode(message), *frames], self.now, self.wall)

    def send_raw(self, peer: bytes, frames: Sequence[bytes]) -> list[Reply]:
        """Hands over frames that may be anything."""
        return self.service.handle(peer, frames, self.now, self.wall)

    def later(self, seconds: float) -> list[Reply]:
        """Time passes."""
        self.now += seconds
        return self.service.tick(self.now, self.wall)

    def create(self, **changes: Any) -> list[Reply]:
        """The chief creates variables, all zero."""
        self.plan = make_plan(num_shards=self.plan.num_shards, num_workers=self.plan.num_workers, **changes)
        layout = layout_of(self.plan)
        sizes = layout.trained[self.index].size_bytes, layout.constants[self.index].size_bytes
        return self.send(b"chief", m.Create(self.plan), *(bytes(size) for size in sizes))

    def join(self, worker: int, incarnation: int = 1, request: int = 1, *, plan: m.Plan | None = None) -> list[Reply]:
        """A worker joins, by frames."""
        return self.send(name(worker), m.Join(worker, incarnation, request, None, plan))

    def gradient(self, value: float = -1.0) -> bytes:
        """This shard's part of a gradient that is the same everywhere."""
        region = layout_of(self.plan).trained[self.index]
        memory = torch.zeros(region.size_bytes, dtype=torch.uint8)
        for section in section_views(region, memory):
            section.fill_(value)
        return memory.numpy().tobytes()

    def push(self, worker: int, step: int, version: int, *, incarnation: int = 1, value: float = -1.0) -> list[Reply]:
        """A worker's gradient; request numbers follow the local step, after that of the join."""
        push = m.Push(worker, incarnation, step + 1, step, version, -1, [], 0.5)
        return self.send(name(worker), push, self.gradient(value))

    def leave(
        self, worker: int, incarnation: int = 1, *, finished: bool = True, why: str = "", **results: float
    ) -> list[Reply]:
        """A worker goes."""
        leave = m.Leave(worker, incarnation, results.get("loss"), results.get("accuracy"), finished, why)
        return self.send(name(worker), leave)

    def values(self) -> torch.Tensor:
        """The elements of the current version, without what pads them."""
        shard = self.shard
        sections = shard.variables.versions.slots.sections[shard.variables.versions.current]
        return torch.cat(
            [
                memory[p.offset : p.offset + p.numel]
                for section, memory in zip(shard.region.sections, sections, strict=True)
                for p in section.pieces
            ]
        )

    def state(self) -> tuple[Any, ...]:
        """All that a message which makes no sense must leave as it was."""
        run = self.service.run
        shard, leader = (run.shard, run.leader) if isinstance(run, Leading) else (run.shard if run else None, None)
        return (
            {name: value for name, value in self.service.status().items() if name != "memory_bytes"},
            dict(self.service.pids),
            None if shard is None else (shard.version, shard.followed, self.values().tolist(), repr(shard.gradients)),
            None
            if leader is None
            else (repr(leader.quorum), leader.log.entries, leader.log.start, repr(leader.arrivals)),
        )

    def close(self) -> None:
        """Gives memory and files up."""
        self.service.close()
        vars(self.service).clear()  # its parts know each other: without this their memory waits for the collector


def name(worker: int) -> bytes:
    """The peer name of a worker."""
    return f"worker/{worker}".encode()


def only(replies: Sequence[Reply], kind: type[M], peer: bytes | None = None) -> M:
    """The one message among the replies, which must be of that kind and go to that peer."""
    assert len(replies) == 1, replies
    assert isinstance(replies[0].message, kind), replies[0]
    assert peer is None or replies[0].peer == peer
    return replies[0].message


def by_peer(replies: Sequence[Reply]) -> dict[bytes, m.Message]:
    """The replies by receiver; nobody gets two."""
    found = {reply.peer: reply.message for reply in replies}
    assert len(found) == len(replies), replies
    return found
