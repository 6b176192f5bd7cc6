"""A task's end of its streams: accepts and admits connections, reads and answers messages, over Unix sockets and TCP alike.

Part of the task's listener; the ps thread calls it. Most of what a ps does for a worker on another host is copying bytes into and out
of the system; with one thread it does that for one worker at a time. So a connection on which large frames come may get a thread of
its own (`stream_thread`), which receives a message, has it handled, and sends the answer.

What always holds: nobody blocks on a peer that does not read or write; what a peer can make a task keep is bounded, before it is admitted
and after; on each connection one message is handled before the next one is read.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.acceptor import Acceptor
from torchquorum.wire.channel import FOREVER_S, READS, Peer, Sent, Take
from torchquorum.wire.codec import Frame
from torchquorum.wire.descriptors import most_connections
from torchquorum.wire.messages import Way
from torchquorum.wire.opening import RefusedConnection
from torchquorum.wire.refusals import TALKS_TOO_MUCH, TOO_MANY, TOO_SLOW, UNFINISHED, Refusals
from torchquorum.wire.stream import LARGE_BYTES, ByteStream, StreamError, WantWrite
from torchquorum.wire.stream_thread import PEERS, StreamConnection, StreamThread

MOST_UNKNOWN = 256  # connections that are not admitted yet
UNKNOWN_S = 10.0
LOOK_EVERY_S = 1.0
ACCEPTED_AT_ONCE = 16
LARGE_AHEAD = 2
SMALL_AHEAD = 1000
NO_THREADS = range(0)


class Opening(Protocol):
    """What a connection goes through before it is admitted."""

    def advance(self) -> ByteStream:
        """Goes on; returns the stream of an admitted peer.

        Raises:
            BlockingIOError: The peer has to say more; WantWrite: something has to leave first.
            RefusedConnection: The peer is not admitted.
            OSError: The connection is gone.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What is particular to one kind of stream.

    Attributes:
        kind: Its name, as in the names of peers.
        ways: How workers reach it, if they do not know that already.
        opening: Begins a new connection, whose socket does not block.
        largest_bytes: A peer that announces a larger frame loses its connection.
        threaded: Frames of these sizes give a connection its own thread.
        take: Handles a message on such a thread; None if there are to be none.
        reuse: Whether the memory of a large frame is used again, by the next but one message of its connection.
        most: How many connections there may be; None asks the system.
        say: Prints a line for people about refused connections.
    """

    kind: str
    ways: Sequence[Way] = ()
    opening: Callable[[socket.socket], Opening]
    largest_bytes: int
    threaded: range = NO_THREADS
    take: Take | None = None
    reuse: bool = True
    most: int | None = None
    say: Callable[[str], None] = lambda _: None


@dataclass(slots=True)
class _Unknown:
    """A connection that is not admitted yet."""

    socket: socket.socket
    opening: Opening
    address: str
    since: float
    polled_for: int = select.EPOLLIN


class StreamListener:
    """A task's end of one kind of stream.

    Args:
        listening: The listening socket, which this listener owns from now on.
        options: What is particular to this kind.
        clock: Tells the time.
    """

    def __init__(self, listening: socket.socket, options: StreamOptions, clock: Clock = SYSTEM) -> None:
        self._options, self._clock = options, clock
        self._threaded = options.threaded if options.take is not None else NO_THREADS
        self.prefix = PEERS + f"{options.kind}/".encode()
        self._unknown: dict[int, _Unknown] = {}  # the oldest first
        self._look_at = 0.0
        self._polled: dict[int, StreamConnection] = {}
        self._peers: dict[Peer, StreamConnection] = {}
        self._threads: list[StreamThread] = []
        self._received: deque[tuple[Peer, list[Frame]]] = deque()
        self._unread: list[StreamConnection] = []  # with bytes that polling does not show
        self._admitted, self._large_ahead = 0, LARGE_AHEAD
        self.refusals = Refusals(options.say, clock=clock)
        self._epoll = select.epoll()
        try:
            self._acceptor = Acceptor(listening, self._watch_acceptor, clock=clock)
        except BaseException:
            self._epoll.close()
            raise
        self._most = most_connections() if options.most is None else options.most

    @property
    def ways(self) -> list[Way]:
        """Returns how workers reach it."""
        return [*self._options.ways]

    @property
    def turned_away(self) -> dict[str, int]:
        """Returns how many connections were refused, by reason."""
        return dict(self.refusals.counts)

    def fileno(self) -> int:
        """Returns a descriptor that shows what comes on any of the connections."""
        return self._epoll.fileno()

    def may_wait_s(self) -> float:
        """Returns 0.0 if something is here that the descriptor does not show; little while somebody is not admitted yet."""
        if self._received or self._unread:
            return 0.0
        return LOOK_EVERY_S if self._unknown or self.refusals.untold else FOREVER_S

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        if not self._received:
            self._collect(timeout_s)
        return self._received.popleft() if self._received else None

    def expect(self, answers: int) -> None:
        """From now on a peer may be sent so many large messages for one that it asks: one for each optimizer of the run."""
        self._large_ahead = LARGE_AHEAD * answers

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message; a peer that is gone is no error, and one that does not read loses what does not fit."""
        connection = self._peers.get(peer)
        if connection is None:
            return None
        writer = connection.writer
        if writer.waiting:
            large = any(len(f) >= LARGE_BYTES for f in frames)
            if writer.large_waiting >= self._large_ahead if large else writer.waiting >= SMALL_AHEAD:
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
        if writer.waiting:
            self._watch(connection)
        return outgoing

    def moved_bytes(self, peer: Peer) -> int:
        """Returns how many bytes have come from a peer so far, and of ours have reached it."""
        connection = self._peers.get(peer)
        return connection.reader.received + connection.writer.delivered if connection is not None else 0

    def any_thread(self, peer: Peer) -> bool:
        """Whether messages to a peer may be sent on any thread: its connection has one of its own."""
        connection = self._peers.get(peer)
        return connection is not None and connection.thread is not None

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that sends too much; it may connect again."""
        if (connection := self._peers.get(peer)) is not None:
            self.refusals.add(TALKS_TOO_MUCH, "")
            self._forget(connection)

    def close(self) -> None:
        """Closes everything."""
        for unknown in [*self._unknown.values()]:
            self._drop(unknown)
        for connection in [*self._polled.values(), *self._peers.values()]:
            self._forget(connection)
        for thread in self._threads:
            thread.join()
        self._acceptor.close()
        self._epoll.close()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _collect(self, timeout_s: float) -> None:
        """Reads at most one message of each connection: it is handled before the next one is read into the same memory."""
        self._acceptor.resume()
        if self._unknown or self.refusals.untold:
            self._look_after_unknown()
        unread, self._unread = self._unread, []
        for connection in unread:
            if self._polled.get(connection.fd) is connection:  # it may have been closed since
                self._read(connection)
        for fd, _ in self._epoll.poll(0.0 if unread else timeout_s):
            if (connection := self._polled.get(fd)) is not None:
                if connection not in unread:
                    self._read(connection)
            elif (unknown := self._unknown.get(fd)) is not None:
                self._open(unknown)
            elif fd == self._acceptor.fileno():
                self._accept()

    def _read(self, connection: StreamConnection) -> None:
        """Does what a connection is ready for: sends what waits, takes its next message."""
        try:
            if connection.polled_for != select.EPOLLIN:
                connection.writer.flush()
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

    # -- who comes ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            refused, accepted = self._acceptor.refused, self._acceptor.accept()
            if accepted is None:
                if self._acceptor.refused > refused:
                    self.refusals.add(TOO_MANY, "")
                return
            accepted.setblocking(False)
            address = _host_of(accepted)
            if len(self._peers) + len(self._unknown) >= self._most:
                self.refusals.add(TOO_MANY, address)
                accepted.close()
                continue
            if len(self._unknown) >= MOST_UNKNOWN:  # the oldest has had the most time
                self._turn_away(next(iter(self._unknown.values())), TOO_MANY)
            unknown = _Unknown(accepted, self._options.opening(accepted), address, self._clock.now())
            self._unknown[accepted.fileno()] = unknown
            self._epoll.register(accepted.fileno(), select.EPOLLIN)
            self._open(unknown)

    def _open(self, unknown: _Unknown) -> None:
        """Goes on with a connection that is not admitted yet."""
        events = select.EPOLLIN
        try:
            stream = unknown.opening.advance()
        except WantWrite:
            events = select.EPOLLOUT
        except BlockingIOError:
            pass
        except RefusedConnection as refused:
            self._turn_away(unknown, refused.why)
            return
        except OSError:
            self._turn_away(unknown, UNFINISHED)
            return
        else:
            self._admit(unknown, stream)
            return
        if events != unknown.polled_for:
            unknown.polled_for = events
            self._epoll.modify(unknown.socket.fileno(), events)

    def _admit(self, unknown: _Unknown, stream: ByteStream) -> None:
        fd = stream.fileno()
        del self._unknown[fd]
        # A number is never used again, as that of a descriptor is: a late answer reaches nobody else.
        self._admitted += 1
        peer = self.prefix + str(self._admitted).encode() + (READS if getattr(stream, "read_only", False) else b"")
        connection = StreamConnection(peer, stream, self._options.largest_bytes, reuse=self._options.reuse)
        self._polled[fd] = self._peers[peer] = connection
        if unknown.polled_for != select.EPOLLIN:
            self._epoll.modify(fd, select.EPOLLIN)
        if stream.pending():
            self._unread.append(connection)

    def _turn_away(self, unknown: _Unknown, why: str) -> None:
        self.refusals.add(why, unknown.address)
        self._drop(unknown)

    def _drop(self, unknown: _Unknown) -> None:
        del self._unknown[unknown.socket.fileno()]
        self._epoll.unregister(unknown.socket.fileno())
        unknown.socket.close()

    def _look_after_unknown(self) -> None:
        """Turns away who has not been admitted in time, and tells people about the refused."""
        now = self._clock.now()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        for unknown in [*self._unknown.values()]:
            if now - unknown.since <= UNKNOWN_S:
                break
            self._turn_away(unknown, TOO_SLOW)
        self.refusals.report()

    def _watch_acceptor(self, fd: int, wanted: bool) -> None:
        if wanted:
            self._epoll.register(fd, select.EPOLLIN)
        else:
            self._epoll.unregister(fd)


def _host_of(accepted: socket.socket) -> str:
    try:
        there = accepted.getpeername()
    except OSError:
        return ""
    return str(there[0]) if isinstance(there, tuple) else ""
