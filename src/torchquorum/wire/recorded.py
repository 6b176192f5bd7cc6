"""What a record is made of: shard 0's log, and beside it what else a worker's numbers depend on.

Written by `torchquorum.server.recorder`, read by `torchquorum.replay`. What always holds: the items are in the order in which shard 0
decided; what an item says was decided before any worker heard of it.
"""

from __future__ import annotations

from typing import Any

import msgspec

import torchquorum.wire.messages as m
from torchquorum.wire.plan import Plan

JOIN, PUSH, PULL, ASSIGN = "join", "push", "pull", "assign"  # what a worker has asked for
DIED, LEFT, FAILED = "died", "left", "failed"  # how a life went out of the run


class Item(msgspec.Struct, array_like=True, tag=True):
    """The base of all items that are no entry of the log."""


class Began(Item):
    """The variables were created: from the chief's values, or from what an earlier generation had made of them at `version`.

    Attributes:
        generation: Of this creation.
        plan: The run's plan.
        version: Where the run begins or goes on.
        base: The generation whose variables it goes on from; -1 for the chief's values.
        checksum: Of the chief's values on shard 0; 0 where there are none.
        task: What the updates depend on besides: threads of ps 0, versions, its processor.
        wall: When, in seconds since the epoch.
        updates: How many updates the variables have, of all optimizers; -1 where there is one: then that is the version.
        kept: The generations before it that are in its past, each with the last of its versions that is.
    """

    generation: int
    plan: Plan
    version: int
    base: int
    checksum: int
    task: dict[str, Any]
    wall: float
    updates: int = -1
    kept: list[tuple[int, int]] = []

    @property
    def place(self) -> int:
        """Returns where in the log it begins: how many updates there are, of all optimizers."""
        return self.version if self.updates < 0 else self.updates


class Life(Item):
    """A worker's process joins for the first time; `body` is what it said of itself, as msgpack: see `session.recording`."""

    worker: int
    incarnation: int
    body: bytes


class Decided(Item):
    """A gradient was computed at `version`, met another, and was accepted or refused."""

    worker: int
    incarnation: int
    local_step: int
    version: int
    met: int
    accepted: bool
    reason: str
    loss: float | None


class Answer(Item):
    """An answer to a worker, at this place of the log: to what it has asked for, and what became of its gradient.

    `number` is the local step of a push, of an assignment which one it is, of a join the local step that was being pushed when the
    connection before it was lost: 0 if none was, -1 if the session had not begun.
    """

    release: m.Release
    kind: str
    number: int
    outcome: m.Outcome | None


class GaveRows(Item):
    """A worker was answered a request for rows, at this place of the log: of which table of which optimizer.

    `ahead` if they were for a later batch, `changed` if what had changed of such was asked for; `keys` is a checksum of those on shard 0.
    """

    worker: int
    incarnation: int
    track: int
    table: int
    ahead: bool
    changed: bool
    keys: int


class Opened(Item):
    """A worker was told that it may go on at the end of an epoch or at a barrier, or in which epoch the run is: `asked` and the answer."""

    worker: int
    incarnation: int
    asked: tuple[int, int, int, bool]
    status: m.BarrierStatus


class Placed(Item):
    """A worker was given the position that a checkpoint had of it, as msgpack."""

    worker: int
    incarnation: int
    body: bytes


class Handed(Item):
    """A worker was given batches of shared data, or told that all are used, or that it holds none any more."""

    worker: int
    incarnation: int
    share: str
    numbers: list[int]
    over: bool
    void: bool


class GaveBuffers(Item):
    """A worker was given the run's buffers."""

    worker: int
    incarnation: int
    whose: list[int]
    values: bytes


class Gone(Item):
    """A life went out of the run; one that counts as dead may come back."""

    worker: int
    incarnation: int
    how: str
    why: str


AnyItem = (
    Began
    | Life
    | Decided
    | Answer
    | Placed
    | Handed
    | GaveBuffers
    | GaveRows
    | Opened
    | Gone
    | m.Apply
    | m.Assigned
    | m.Drop
    | m.Release
    | m.Snapshot
    | m.End
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyItem])


def encode_items(items: list[AnyItem]) -> bytes:
    """Returns some items as a frame of a record."""
    return _encoder.encode(items)


def decode_items(frame: bytes) -> list[AnyItem]:
    """Returns the items of a frame.

    Raises:
        msgspec.DecodeError: It has other items than this release knows.
    """
    return _decoder.decode(frame)
