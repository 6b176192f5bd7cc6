"""The seam between tasks and the network: a Channel on the side that connects, a Listener on the side that is connected to.

Server and worker are written against these two protocols alone; ZeroMQ, the in-process network and the faulty wrapper
implement them. A message is a list of frames: one header, then tensors. Delivery is at most once; whoever needs an answer
asks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchquorum.transport.codec import Frame

Peer = bytes


class Sent(Protocol):
    """A message on its way: its large frames must not change before it is done."""

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
        """It has been sent, or is on its way."""
        self._sent, self._given_over = sent, True


class Channel(Protocol):
    """One end of a connection to one ps task. Used by one thread."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends a message; never blocks for long, and may lose it."""
        ...

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time."""
        ...

    def close(self) -> None:
        """Closes this end."""
        ...


class Listener(Protocol):
    """The ps task's end of all connections to it. Used by one thread."""

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        ...

    def wait(self, others: Sequence[Channel], timeout_s: float) -> None:
        """Returns when something has come here or on one of the other channels, or when the time is up."""
        ...

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message to a sender heard of before; a peer that is gone is no error.

        Returns:
            A handle to ask when the frames are free again, or None if they are already.
        """
        ...

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that talks too much, where that can be done; it may come again."""
        ...

    def close(self) -> None:
        """Stops listening."""
        ...
