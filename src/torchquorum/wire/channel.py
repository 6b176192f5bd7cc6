"""The seam between tasks and the network: a Channel on the side that connects, a Listener on the side that is connected to.

Server and worker are written against these two protocols alone and never ask which transport they have. A message is a list of
frames: one header, then tensors. Delivery is at most once; who needs an answer asks again.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Sequence
from typing import Protocol

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import Way

Peer = bytes
Choose = Callable[[Frame, Sequence[int]], Sequence[memoryview] | None]
Take = Callable[[Peer, list[Frame]], None]
FOREVER_S = math.inf


class Pieces(list[memoryview]):
    """One frame that lies in several pieces of memory. Every channel can send it."""

    def size_bytes(self) -> int:
        """Returns how large the frame is."""
        return sum(map(len, self))


def whole(frames: Sequence[Frame | Pieces]) -> list[Frame]:
    """Returns frames that lie in one piece each, for a channel that cannot send from several; only `Pieces` are copied."""
    return [b"".join(f) if isinstance(f, Pieces) else f for f in frames]


class Sent(Protocol):
    """A message that is being sent: its large frames must not change before it is done."""

    @property
    def done(self) -> bool:
        """Whether the frames are free again."""
        ...


class Later:
    """A message that is sent later, or is lost after all."""

    def __init__(self) -> None:
        self._given_over = False
        self._sent: Sent | None = None

    @property
    def done(self) -> bool:
        """Whether its memory is no longer needed."""
        return self._given_over and (self._sent is None or self._sent.done)

    def given_over(self, sent: Sent | None) -> None:
        """It has been sent, or is being sent."""
        self._sent, self._given_over = sent, True


class Pollable(Protocol):
    """Something that messages come from, as a poll loop sees it."""

    def fileno(self) -> int:
        """Returns a descriptor that polls readable when something may have come; -1 if there is none."""
        ...

    def may_wait_s(self) -> float:
        """Returns how long the descriptor alone may be waited for: 0.0 if something is here already, usually `FOREVER_S`."""
        ...


class Descriptor:
    """A descriptor alone, as a poll loop sees it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Returns it."""
        return self._fd

    def may_wait_s(self) -> float:
        """Returns for ever: it shows all there is."""
        return FOREVER_S


def wait_for_any(sources: Sequence[Pollable], timeout_s: float, clock: Clock = SYSTEM) -> None:
    """Returns when something has come from one of the sources, or when the time is up."""
    deadline = clock.now() + timeout_s
    poll = select.poll()
    for source in sources:
        if source.fileno() >= 0:
            poll.register(source.fileno(), select.POLLIN)
    while (may_s := min(source.may_wait_s() for source in sources)) > 0 and (left_s := deadline - clock.now()) > 0:
        if not all(source.fileno() >= 0 for source in sources):
            clock.sleep(min(may_s, left_s))
        elif poll.poll(min(may_s, left_s) * 1000):
            return


class Channel(Pollable, Protocol):
    """One end of a connection to one ps task. Used by one thread."""

    @property
    def closed(self) -> bool:
        """Whether the other side is known to have closed the connection; False where that cannot be known."""
        ...

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        """Sends a message; never blocks for long, and may lose it. Large frames must not change before the answer has come."""
        ...

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time."""
        ...

    def receive_into(self, choose: Choose) -> None:
        """Lets the receiver choose, by header and sizes of a message, where its second frame goes. A hint: it may be ignored."""
        ...

    def settled(self) -> Channel:
        """Returns the channel to go on with when it must be known that the connection was lost: `closed` says so, and it is not made again.

        A large frame is then valid until the next but one message only.
        """
        ...

    def close(self) -> None:
        """Closes this end."""
        ...


class Receiver(Pollable, Protocol):
    """A ps task's end of connections to it. Used by one thread, except where a method says otherwise."""

    @property
    def ways(self) -> list[Way]:
        """Returns the faster transports by which workers can reach this task, best first."""
        ...

    @property
    def turned_away(self) -> dict[str, int]:
        """Returns how many connections were refused, by reason."""
        ...

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        ...

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message to a sender heard of before; a peer that is gone is no error.

        Returns:
            A handle to ask when the frames are free again, or None if they are already.
        """
        ...

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that sends too much, where that can be done; it may connect again."""
        ...

    def close(self) -> None:
        """Stops listening."""
        ...


class ListenerPart(Receiver, Protocol):
    """The end of one transport, which is joined with others to one listener."""

    @property
    def prefix(self) -> bytes:
        """Returns what the names of its peers begin with, and those of no other transport."""
        ...

    def any_thread(self, peer: Peer) -> bool:
        """Whether messages to a peer may be sent on any thread."""
        ...


class Listener(Receiver, Protocol):
    """The end of all connections to a ps task."""

    def wait(self, others: Sequence[Pollable], timeout_s: float) -> None:
        """Returns when something has come here or on one of the other channels, or when the time is up."""
        ...

    def wake(self) -> None:
        """Ends the wait of the thread that receives; may be called on any thread."""
        ...
