"""What a transport is: the record that `torchquorum.wire.transports` lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.wire.channel import Channel, ListenerPart, Take


@dataclass(frozen=True, kw_only=True)
class Listening:
    """What a task that listens tells each transport.

    Attributes:
        address: host:port of the task in the cluster.
        listen_fd: A listening socket for it that the launcher made, if any.
        access: Who may connect.
        readers: Whether those may who have the read-only form of the secret; their names end with `channel.READS`.
        take: Handles a message on a transport's own thread; None if all are to be received.
        largest_bytes: The largest frame that may come; None asks the system.
        reuse: Whether the memory of a large frame is used again, by the next but one message of its connection.
        say: Prints a line for people.
        clock: Tells the time.
    """

    address: str
    listen_fd: int | None = None
    access: Access = OPEN
    readers: bool = False
    take: Take | None = None
    largest_bytes: int | None = None
    reuse: bool = True
    say: Callable[[str], None] = lambda _: None
    clock: Clock = SYSTEM


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A way for messages between a worker and a ps task.

    Attributes:
        kind: Its name, as a Way gives it.
        same_host: Whether it is only for workers that share memory with the ps task; otherwise it is for all.
        listen: Makes the ps task's end; returns None where this transport is not to be offered.
        connect: Makes a worker's channel from the ps task's host, the Way's `where` and a clock; raises OSError if it cannot.
    """

    kind: str
    same_host: bool
    listen: Callable[[Listening], ListenerPart | None]
    connect: Callable[[str, str, Clock], Channel]
