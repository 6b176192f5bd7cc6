"""A network inside one process: queues instead of sockets. For tests, and for a program that runs alone with its ps.

Frames are copied on their way, as any network does, so that the sender may use its memory again.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from torchquorum.transport.channel import Channel, Peer
from torchquorum.transport.codec import Frame


class InProcessNetwork:
    """Addresses are plain names; a listener may come after its first caller. Safe from any thread."""

    def __init__(self) -> None:
        self._inboxes: dict[str, queue.SimpleQueue[tuple[Peer, list[Frame]]]] = {}
        self._outboxes: dict[Peer, queue.SimpleQueue[list[Frame]]] = {}

    def _inbox(self, address: str) -> queue.SimpleQueue[tuple[Peer, list[Frame]]]:
        return self._inboxes.setdefault(address, queue.SimpleQueue())

    def _outbox(self, address: str, peer: Peer) -> queue.SimpleQueue[list[Frame]]:
        return self._outboxes.setdefault(address.encode() + b"|" + peer, queue.SimpleQueue())

    def listen(self, address: str) -> InProcessListener:
        """Returns the listener of an address."""
        return InProcessListener(self, address)

    def connect(self, address: str, identity: bytes) -> InProcessChannel:
        """Returns a channel to an address."""
        return InProcessChannel(self, address, identity)


class InProcessListener:
    """The ps task's end."""

    def __init__(self, network: InProcessNetwork, address: str) -> None:
        self._network, self._address = network, address
        self._queue = network._inbox(address)

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        try:
            return self._queue.get(timeout=max(0.0, timeout_s)) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None

    def wait(self, others: Sequence[Channel], timeout_s: float) -> None:
        """Returns when something has come here or on one of the other channels, or when the time is up."""
        deadline = time.monotonic() + timeout_s
        queues = [self._queue, *(other.inbox for other in others if isinstance(other, InProcessChannel))]
        while all(q.empty() for q in queues) and time.monotonic() < deadline:
            time.sleep(0.0002)

    def send(self, peer: Peer, frames: Sequence[Frame]) -> None:
        """Sends a message."""
        self._network._outbox(self._address, peer).put([bytes(f) for f in frames])

    def hang_up(self, peer: Peer) -> None:
        """Does nothing: whoever is inside this process is no stranger."""

    def close(self) -> None:
        """Does nothing: there is nothing to close."""


class InProcessChannel:
    """The connecting end."""

    def __init__(self, network: InProcessNetwork, address: str, identity: bytes) -> None:
        self._there = network._inbox(address)
        self.inbox = network._outbox(address, identity)
        self._identity = identity

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends a message."""
        self._there.put((self._identity, [bytes(f) for f in frames]))

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time."""
        try:
            return self.inbox.get(timeout=timeout_s) if timeout_s > 0 else self.inbox.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Does nothing: there is nothing to close."""
