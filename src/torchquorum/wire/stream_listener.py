"""A ps task's end of its streams: accepts and admits connections, reads and answers messages, over Unix sockets and TCP alike.

Part of the task's listener; the ps thread calls it. Most of what a ps does for a worker on another host is copying bytes into and out
of the system; with one thread it does that for one worker at a time. So a connection on which large frames come may get a thread of
its own (`stream_thread`), which receives a message, has it handled, and sends the answer.

What always holds: nobody blocks on a peer that does not read or write; what a peer can make a ps keep is bounded, before it is admitted
and after; on each connection one message is handled before the next one is read.
"""

from __future__ import annotations

import hmac
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.acceptor import Acceptor
from torchquorum.wire.channel import FOREVER_S, Peer, Sent, Take
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import Way
from torchquorum.wire.stream import LARGE_BYTES, SocketStream, StreamError
from torchquorum.wire.stream_thread import PEERS, StreamConnection, StreamThread

MOST_UNKNOWN = 64  # connections that have not shown their token yet
UNKNOWN_S = 3.0
LARGE_AHEAD = 2
SMALL_AHEAD = 1000
NO_THREADS = range(0)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What is particular to one kind of stream.

    Attributes:
        way: How workers reach it; its kind is in the names of peers.
        admit: Prepares a new connection; returns whether it may stay.
        token: What a connection must send before anything else.
        refused: Why a connection was turned away, for people.
        largest_bytes: A peer that announces a larger frame loses its connection.
        threaded: Frames of these sizes give a connection its own thread.
        take: Handles a message on such a thread; None if there are to be none.
    """

    way: Way
    admit: Callable[[socket.socket], bool]
    token: bytes = b""
    refused: str
    largest_bytes: int
    threaded: range = NO_THREADS
    take: Take | None = None


class StreamListener:
    """A ps task's end of one kind of stream.

    Args:
        listening: The listening socket, which this listener owns from now on.
        options: What is particular to this kind.
        clock: Tells the time.
    """

    def __init__(self, listening: socket.socket, options: StreamOptions, clock: Clock = SYSTEM) -> None:
        self._options, self._clock = options, clock
        self._threaded = options.threaded if options.take is not None else NO_THREADS
        self.prefix = PEERS + f"{options.way.kind}/".encode()
        self._polled: dict[int, StreamConnection] = {}
        self._peers: dict[Peer, StreamConnection] = {}
        self._threads: list[StreamThread] = []
        self._received: deque[tuple[Peer, list[Frame]]] = deque()
        self._unread: list[StreamConnection] = []  # with bytes that polling does not show
        self._accepted = self._turned_away = 0
        self._epoll = select.epoll()
        try:
            self._acceptor = Acceptor(listening, self._watch_acceptor, clock=clock)
        except BaseException:
            self._epoll.close()
            raise

    @property
    def ways(self) -> list[Way]:
        """Returns how workers reach it."""
        return [self._options.way]

    @property
    def turned_away(self) -> dict[str, int]:
        """Returns how many connections were refused, by reason."""
        return {self._options.refused: self._turned_away} if self._turned_away else {}

    def fileno(self) -> int:
        """Returns a descriptor that shows what comes on any of the connections."""
        return self._epoll.fileno()

    def may_wait_s(self) -> float:
        """Returns 0.0 if something is here that the descriptor does not show."""
        return 0.0 if self._received or self._unread else FOREVER_S

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        if not self._received:
            self._collect(timeout_s)
        return self._received.popleft() if self._received else None

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message; a peer that is gone is no error, and one that does not read loses what does not fit."""
        connection = self._peers.get(peer)
        if connection is None:
            return None
        writer = connection.writer
        if writer.waiting:
            large = any(len(f) >= LARGE_BYTES for f in frames)
            if writer.large_waiting >= LARGE_AHEAD if large else writer.waiting >= SMALL_AHEAD:
                return None  # it has not taken what it asked for before; it will ask again
        if connection.thread is not None:
            outgoing = writer.put(frames)
            connection.thread.wake()
            return outgoing
        try:
            outgoing = writer.send(frames)
        except OSError:
            self._forget(connection)
            return None
        if outgoing is not None:
            self._watch(connection)
        return outgoing

    def any_thread(self, peer: Peer) -> bool:
        """Whether messages to a peer may be sent on any thread: its connection has one of its own."""
        connection = self._peers.get(peer)
        return connection is not None and connection.thread is not None

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that sends too much; it may connect again."""
        if (connection := self._peers.get(peer)) is not None:
            self._forget(connection)

    def close(self) -> None:
        """Closes everything."""
        for connection in [*self._polled.values(), *self._peers.values()]:
            self._forget(connection)
        for thread in self._threads:
            thread.join()
        self._acceptor.close()
        self._epoll.close()

    def _collect(self, timeout_s: float) -> None:
        """Reads at most one message of each connection: it is handled before the next one is read into the same memory."""
        self._acceptor.resume()
        unread, self._unread = self._unread, []
        for connection in unread:
            if self._polled.get(connection.fd) is connection:  # it may have been closed since
                self._read(connection)
        for fd, _ in self._epoll.poll(0.0 if unread else timeout_s):
            connection = self._polled.get(fd)
            if connection is None:
                self._accept()
            elif connection not in unread:
                self._read(connection)

    def _read(self, connection: StreamConnection) -> None:
        """Does what a connection is ready for: sends what waits, admits it, takes its next message."""
        try:
            if connection.polled_for != select.EPOLLIN:
                connection.writer.flush()
            if not connection.admitted and not self._is_admitted(connection):
                return
            message = connection.read(self._threaded)
        except (OSError, StreamError):
            self._forget(connection)
            return
        if message is not None:
            self._received.append((connection.peer, message))
            if connection.reader.more:
                self._unread.append(connection)
        elif connection.reader.wanted_bytes in self._threaded:
            self._give_thread(connection)
            return
        if connection.wants_write or connection.polled_for != select.EPOLLIN:
            self._watch(connection)

    def _accept(self) -> None:
        accepted = self._acceptor.accept()
        if accepted is None:
            return
        now = self._clock.now()
        unknown = [c for c in self._polled.values() if not c.admitted]
        for connection in unknown:
            if now - connection.since > UNKNOWN_S or len(unknown) >= MOST_UNKNOWN:
                self._turned_away += 1
                self._forget(connection)
        if not self._options.admit(accepted):
            self._turned_away += 1
            accepted.close()
            return
        self._accepted += (
            1  # a number is never used again, as that of a descriptor is: a late answer reaches nobody else
        )
        peer = self.prefix + str(self._accepted).encode()
        connection = StreamConnection(peer, SocketStream.of(accepted), self._options.largest_bytes, now)
        self._polled[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)
        if not self._options.token:
            self._admit(connection)

    def _is_admitted(self, connection: StreamConnection) -> bool:
        """Reads the token that a new connection must send; False if it is not all there yet.

        Raises:
            OSError: The peer is gone, or does not know the token.
        """
        wanted = self._options.token
        try:
            given = connection.read_token(len(wanted))
        except BlockingIOError:
            return False
        if not hmac.compare_digest(given, wanted):
            self._turned_away += 1
            raise PermissionError
        self._admit(connection)
        return True

    def _admit(self, connection: StreamConnection) -> None:
        connection.admitted = True
        self._peers[connection.peer] = connection

    def _watch_acceptor(self, fd: int, wanted: bool) -> None:
        if wanted:
            self._epoll.register(fd, select.EPOLLIN)
        else:
            self._epoll.unregister(fd)

    def _watch(self, connection: StreamConnection) -> None:
        """Polls a connection for what it waits for."""
        events = connection.events()
        if events != connection.polled_for:
            connection.polled_for = events
            self._epoll.modify(connection.fd, events)

    def _give_thread(self, connection: StreamConnection) -> None:
        assert self._options.take is not None
        self._epoll.unregister(connection.fd)
        del self._polled[connection.fd]
        self._threads = [*filter(StreamThread.alive, self._threads)]
        try:
            self._threads.append(StreamThread(connection, self._options.take, self._gone))
        except (OSError, RuntimeError):  # no descriptor or thread is left for it: the ps thread reads on
            self._polled[connection.fd] = connection
            self._epoll.register(connection.fd, connection.events())
            connection.polled_for = connection.events()

    def _gone(self, connection: StreamConnection) -> None:
        """On a connection's own thread: it has ended."""
        self._peers.pop(connection.peer, None)

    def _forget(self, connection: StreamConnection) -> None:
        self._peers.pop(connection.peer, None)
        if connection.thread is not None:
            connection.thread.end()
        elif self._polled.pop(connection.fd, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(connection.fd)
            connection.close()
