"""A network inside one process: queues instead of sockets. For tests, and for a program that runs alone with its ps.

Each inbox is read by one thread. Frames are copied when they are sent, as any network does, so that the sender may use its memory again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.channel import UNKNOWN, Choose, Peer, Pieces, Pollable, Progress, wait_for_any, whole
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import Way

LOOK_EVERY_S = 0.0002
_Item = TypeVar("_Item")


class _Inbox(Generic[_Item]):
    """A queue that any thread may fill and one thread empties, by a clock that may be virtual."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._items: deque[_Item] = deque()
        self._filled = threading.Event()
        self._woken = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _Item) -> None:
        self._items.append(item)
        self._filled.set()

    def wake(self) -> None:
        self._woken = True
        self._filled.set()

    def get(self, timeout_s: float) -> _Item | None:
        if not self._items and timeout_s > 0:
            self._filled.clear()  # before the next look: what comes later sets it again
            if not self._items and not self._woken:
                self.clock.wait(self._filled, timeout_s)
            self._woken = False
        return self._items.popleft() if self._items else None


class InProcessNetwork:
    """Addresses are plain names; a listener may come after its first caller. Safe from any thread."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._inboxes: dict[str, _Inbox[tuple[Peer, list[Frame]]]] = {}
        self._outboxes: dict[Peer, _Inbox[list[Frame]]] = {}

    def inbox(self, address: str) -> _Inbox[tuple[Peer, list[Frame]]]:
        """Returns what was sent to an address and not yet received."""
        return self._inboxes.setdefault(address, _Inbox(self._clock))

    def outbox(self, address: str, peer: Peer) -> _Inbox[list[Frame]]:
        """Returns what was sent from an address to a peer and not yet received."""
        return self._outboxes.setdefault(address.encode() + b"|" + peer, _Inbox(self._clock))

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
        self._inbox = network.inbox(address)
        self.ways: list[Way] = []
        self.turned_away: dict[str, int] = {}

    def fileno(self) -> int:
        """Returns -1: there is no descriptor to poll."""
        return -1

    def may_wait_s(self) -> float:
        """Returns how long to wait before looking again."""
        return 0.0 if self._inbox else LOOK_EVERY_S

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        return self._inbox.get(timeout_s)

    def wait(self, others: Sequence[Pollable], timeout_s: float) -> None:
        """Returns when something has come here or on one of the other channels, or when the time is up."""
        wait_for_any([self, *others], timeout_s, self._inbox.clock)

    def send(self, peer: Peer, frames: Sequence[Frame]) -> None:
        """Sends a message."""
        self._network.outbox(self._address, peer).put([bytes(f) for f in frames])

    def expect(self, answers: int) -> None:
        """Does nothing: nothing is lost here."""

    def wake(self) -> None:
        """Ends a wait in `receive`; may be called on any thread."""
        self._inbox.wake()

    def moved_bytes(self, peer: Peer) -> int:
        """Returns 0: messages come whole."""
        return 0

    def hang_up(self, peer: Peer) -> None:
        """Does nothing: all peers are in this process."""

    def close(self) -> None:
        """Does nothing: there is nothing to close."""


class InProcessChannel:
    """The connecting end."""

    closed = False

    def __init__(self, network: InProcessNetwork, address: str, identity: bytes) -> None:
        self._there = network.inbox(address)
        self._inbox = network.outbox(address, identity)
        self._identity = identity

    def fileno(self) -> int:
        """Returns -1: there is no descriptor to poll."""
        return -1

    def may_wait_s(self) -> float:
        """Returns how long to wait before looking again."""
        return 0.0 if self._inbox else LOOK_EVERY_S

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        """Sends a message."""
        self._there.put((self._identity, [bytes(f) for f in whole(frames)]))

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time."""
        return self._inbox.get(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Returns True: what was sent is there."""
        return True

    def progress(self) -> Progress:
        """Returns nothing: messages come whole."""
        return UNKNOWN

    def receive_into(self, choose: Choose, *, several: bool = False) -> None:
        """Does nothing: what was sent lies in memory of its own already."""

    def settled(self) -> InProcessChannel:
        """Returns this channel: inside a process no connection is lost."""
        return self

    def close(self) -> None:
        """Does nothing: there is nothing to close."""
