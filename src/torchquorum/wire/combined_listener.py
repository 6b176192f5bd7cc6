"""A ps task's listener: the entry that everybody knows, and the faster transports beside it, as one.

Made by `torchquorum.wire.transports.listen`, owned by the ps thread. What always holds: each transport gives one message at a time,
so that a flood on one holds up no other; a message to a peer is sent by the thread that receives, except where a transport
allows any thread.
"""

from __future__ import annotations

import os
import select
import threading
from collections import Counter, deque
from collections.abc import Sequence

from torchquorum.wire.channel import FOREVER_S, Later, ListenerPart, Peer, Pollable, Sent
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import Way


class CombinedListener:
    """Several transports as one listener.

    Args:
        entry: The transport at the address that everybody knows.
        parts: The others, best first.
    """

    def __init__(self, entry: ListenerPart, parts: Sequence[ListenerPart]) -> None:
        self._parts = [*parts, entry]
        self._received: deque[tuple[Peer, list[Frame]]] = deque()
        self._deferred: deque[tuple[Peer, Sequence[Frame], Later]] = deque()
        self._thread = threading.get_ident()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._epoll = select.epoll()
        except BaseException:
            os.close(self._woken)
            raise
        self._others: dict[int, Pollable] = {}
        self._by_fd = {part.fileno(): part for part in self._parts}
        for fd in (self._woken, *self._by_fd):
            self._epoll.register(fd, select.EPOLLIN)

    @property
    def ways(self) -> list[Way]:
        """Returns the faster transports by which workers can reach this task, best first."""
        return [way for part in self._parts for way in part.ways]

    @property
    def turned_away(self) -> dict[str, int]:
        """Returns how many connections were refused, by reason."""
        counts: Counter[str] = Counter()
        for part in reversed(self._parts):
            counts.update(part.turned_away)
        return dict(counts)

    def fileno(self) -> int:
        """Returns a descriptor that shows what comes on any of the transports."""
        return self._epoll.fileno()

    def may_wait_s(self) -> float:
        """Returns how long the descriptor alone may be waited for."""
        return 0.0 if self._received else min(part.may_wait_s() for part in self._parts)

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        if not self._received:
            self._collect(timeout_s)
        return self._received.popleft() if self._received else None

    def wait(self, others: Sequence[Pollable], timeout_s: float) -> None:
        """Returns when something has come here or on one of the other channels, or when the time is up."""
        for other in others:
            fd = other.fileno()
            if fd >= 0 and self._others.get(fd) is not other:
                self._others[fd] = other
                self._epoll.register(fd, select.EPOLLIN)
            timeout_s = min(timeout_s, other.may_wait_s())
        if not self._received:
            self._collect(timeout_s)

    def wake(self) -> None:
        """Ends the wait of the thread that receives; may be called on any thread."""
        os.eventfd_write(self._woken, 1)

    def expect(self, answers: int) -> None:
        """From now on a peer may be sent so many large messages for one that it asks: one for each optimizer of the run."""
        for part in self._parts:
            part.expect(answers)

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message by the transport that its receiver uses; may be called on any thread."""
        part = self._part_of(peer)
        if threading.get_ident() == self._thread or part.any_thread(peer):
            return part.send(peer, frames)
        later = Later()
        self._deferred.append((peer, frames, later))
        self.wake()
        return later

    def moved_bytes(self, peer: Peer) -> int:
        """Returns how many bytes have come from a peer so far, and of ours have reached it."""
        return self._part_of(peer).moved_bytes(peer)

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that sends too much; it may connect again."""
        self._part_of(peer).hang_up(peer)

    def close(self) -> None:
        """Closes all transports; the entry last."""
        for part in self._parts:
            part.close()
        self._epoll.close()
        os.close(self._woken)

    def _part_of(self, peer: Peer) -> ListenerPart:
        for part in self._parts:
            if peer.startswith(part.prefix):
                return part
        raise AssertionError("every name begins with the prefix of a transport")

    def _collect(self, timeout_s: float) -> None:
        self._thread = threading.get_ident()
        ready: list[ListenerPart] = []
        for part in self._parts:
            if (may_s := part.may_wait_s()) < FOREVER_S:  # something is here, or has to be done soon
                ready.append(part)
                timeout_s = min(timeout_s, may_s)
        for fd, _ in self._epoll.poll(max(0.0, timeout_s)):
            if fd == self._woken:
                self._send_deferred()
            elif (part := self._by_fd.get(fd)) is not None and part not in ready:
                ready.append(part)
        for part in ready:
            if (message := part.receive(0.0)) is not None:
                self._received.append(message)

    def _send_deferred(self) -> None:
        """Sends what other threads have left to this one."""
        os.eventfd_read(self._woken)
        while self._deferred:
            peer, frames, later = self._deferred.popleft()
            later.given_over(self.send(peer, frames))
