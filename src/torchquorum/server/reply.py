"""What goes into the service of a ps task and what comes out: a decoded message with its sender, and replies as data.

Used by everything that answers messages. Nothing here sends; `serve` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torchquorum.wire.channel import Peer, Sent
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import Message

# Stands for shard 0 as the peer of another shard. Reserved: no peer's identity starts with a NUL byte.
LEADER = b"\0leader"

_M = TypeVar("_M")


@dataclass(slots=True)
class Delivery:
    """Where a large answer to a peer is, as what sends it says.

    Attributes:
        peer: Who gets it.
        waits: It is kept until the disk has what it says.
        sent: How it was sent; None says that nothing of it is on its way.
    """

    peer: Peer
    waits: bool = False
    sent: Sent | None = None

    def is_under_way_to(self, peer: Peer) -> bool:
        """Whether some of it has yet to reach a peer, and will."""
        return self.peer == peer and (self.waits or (self.sent is not None and self.sent.on_its_way))


@dataclass(slots=True)
class Reply:
    """A message to a peer.

    Attributes:
        peer: Who gets it.
        message: The message.
        frames: What follows it.
        slot: The version slot whose bytes are among the frames, uncopied.
        delivery: Is told how a large answer is sent.
        track: Whose slot it is.
    """

    peer: Peer
    message: Message
    frames: list[Frame] = field(default_factory=list)
    slot: int | None = None
    delivery: Delivery | None = None
    track: int = 0


@dataclass(slots=True)
class Incoming(Generic[_M]):
    """A decoded message, who sent it and when."""

    peer: Peer
    message: _M
    frames: Sequence[Frame]
    now: float
    wall: float

    def reply(self, message: Message) -> Reply:
        """Returns a reply to the sender."""
        return Reply(self.peer, message)
