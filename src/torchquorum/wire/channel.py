"""The seam between tasks and the network: a Channel on the side that connects, a Listener on the side that is connected to.

Server and worker are written against these two protocols alone and never ask which transport they have. A message is a list of
frames: one header, then tensors. Delivery is at most once; who needs an answer asks again.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import Way

Peer = bytes
Choose = Callable[[Frame, Sequence[int]], Sequence[memoryview] | None]
Take = Callable[[Peer, list[Frame]], None]
FOREVER_S = math.inf
READS = b"/reads"  # what the name of a peer ends with that may only read


class Pieces(list[memoryview]):
    """One frame that lies in several pieces of memory. Every channel can send it."""

    def size_bytes(self) -> int:
        """Returns how large the frame is."""
        return sum(map(len, self))


def whole(frames: Sequence[Frame | Pieces]) -> list[Frame]:
    """Returns frames that lie in one piece each, for a channel that cannot send from several; only `Pieces` are copied."""
    return [b"".join(f) if isinstance(f, Pieces) else f for f in frames]


class Progress(NamedTuple):
    """What has moved on a connection. A transport that cannot know it says `UNKNOWN`.

    Attributes:
        received: How many bytes have come since the connection was made.
        delivered: How many bytes of ours have reached the other side's system since then.
        leaving: How many bytes of ours are on their way.
        coming: The size of the message that is coming; 0 if none has begun.
        came: How many bytes of it have come.
    """

    received: int = 0
    delivered: int = 0
    leaving: int = 0
    coming: int = 0
    came: int = 0

    @property
    def under_way(self) -> bool:
        """Whether a message is on its way, in either direction."""
        return self.leaving > 0 or self.coming > 0


UNKNOWN = Progress()


class Sent(Protocol):
    """A message that is being sent: its large frames must not change before it is done."""

    @property
    def done(self) -> bool:
        """Whether the frames are free again."""
        ...

    @property
    def on_its_way(self) -> bool:
        """Whether some of it has not reached the other side's system yet, as far as the transport can know."""
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

    @property
    def on_its_way(self) -> bool:
        """Whether some of it has not reached the other side's system yet."""
        return not self._given_over or (self._sent is not None and self._sent.on_its_way)

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
        """Sends a message as far as it fits; never blocks, and may lose it. Large frames must not change before the answer has come.

        What does not fit leaves while the channel is flushed or received from.
        """
        ...

    def flush(self, timeout_s: float) -> bool:
        """Sends what did not fit, as far as that goes in this time; returns whether nothing is left."""
        ...

    def progress(self) -> Progress:
        """Returns what has moved, so that a slow connection can be told from a lost one."""
        ...

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time."""
        ...

    def receive_into(self, choose: Choose, *, several: bool = False) -> None:
        """Lets the receiver choose, by header and sizes of a message, where its second frame goes. A hint: it may be ignored.

        With `several` the large frames of one message are still used when others have come: each has memory of its own.
        """
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
            A handle to ask when the frames are free again, and of a large message whether it is on its way; None if there is nothing
            to ask.
        """
        ...

    def expect(self, answers: int) -> None:
        """From now on a peer may be sent so many large messages for one that it asks: one for each optimizer of the run."""
        ...

    def moved_bytes(self, peer: Peer) -> int:
        """Returns how many bytes have come from a peer so far, and of ours have reached it; 0 where that is not known."""
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
