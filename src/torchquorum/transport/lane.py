"""The fast way to a ps task on another host: a plain TCP connection for gradients and variables, beside ZeroMQ's.

ZeroMQ hands every message to a thread of its own, into memory of its own; for a megabyte that costs more than the network
of one host does. On a lane the task's own thread sends from where the bytes lie and receives into memory that is used
again. Only where the cluster has no secret: a lane does not encrypt. Its port is told in the ps's Welcome together with
a word that whoever comes must say first; who cannot reach it goes on with ZeroMQ.

A frame may be sent from several pieces of memory, and received into memory that the receiver chooses when it has seen the
header, so that gradients leave from where they were computed and variables arrive where they are used.

What always holds: neither side blocks on a peer that does not read or write; what a stranger can make a ps keep is bounded;
a received large frame is valid until the next but one message of the same connection.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from torchquorum.transport.channel import Peer, Sent
from torchquorum.transport.codec import MAX_HEADER_BYTES, Frame
from torchquorum.transport.entrance import Entrance

PREFIX = b"\0lane/"  # nobody may give himself a ZeroMQ identity with a zero in front
WORD_BYTES = 32
MOST_FRAMES = 16
LARGE_BYTES = 64 << 10
CONNECT_S = 2.0
SEND_S = 10.0
MOST_STRANGERS = 64
STRANGER_S = 3.0
LARGE_AHEAD = 2
MOST_AT_ONCE = 512  # pieces of memory; the system has a limit of its own, 1024
SMALL_AHEAD = 1000
BUFFER_BYTES = 4 << 20
SPIN_S = 0.004
_COUNT = struct.Struct("<I")


def _prepare(lane: socket.socket) -> None:
    lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lane.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _widen(lane: socket.socket) -> None:
    """Gives a socket room for a whole message, where the system allows that much; elsewhere it adapts by itself."""
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        try:
            most = int(Path(f"/proc/sys/net/core/{limit}").read_text())
        except (OSError, ValueError):
            continue
        if most >= BUFFER_BYTES // 2:
            lane.setsockopt(socket.SOL_SOCKET, option, min(most, BUFFER_BYTES))


class Room(bytearray):
    """Memory that a lane uses again for large frames; who has cut it into views may keep them here."""

    __slots__ = ("cut",)

    cut: object

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.cut = None


class Pieces(list[memoryview]):
    """A frame that lies in several pieces of memory; understood by lanes alone."""

    def size_bytes(self) -> int:
        """Returns how large the frame is."""
        return sum(map(len, self))


Choose = Callable[[Frame, Sequence[int]], Sequence[memoryview] | None]


def _sizes(frames: Sequence[Frame | Pieces]) -> list[int]:
    return [f.size_bytes() if isinstance(f, Pieces) else len(f) for f in frames]


def _head(sizes: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)


class LaneError(Exception):
    """What came on a lane makes no sense."""


class _Reader:
    """Puts messages together as their bytes come.

    Args:
        largest_bytes: The largest frame that may come.
        choose: Given the header and the sizes of the other frames, returns memory for the first of those, in pieces, or None.
    """

    def __init__(self, largest_bytes: int, choose: Choose | None = None) -> None:
        self._largest, self.choose = largest_bytes, choose
        self._kept: deque[Room] = deque()
        self._begin()

    def _begin(self) -> None:
        self._frames: list[Frame] = []
        self._left: tuple[int, ...] = ()
        self._pieces: deque[memoryview] = deque()
        self._wanted = memoryview(bytearray(_COUNT.size))
        self._at, self._stage = 0, "count"

    def room(self) -> memoryview:
        """Returns where the next bytes go."""
        return self._wanted[self._at :]

    def took(self, count: int) -> list[Frame] | None:
        """So many bytes have come; returns the message if that was its end."""
        self._at += count
        while self._at == len(self._wanted):
            if self._stage == "count":
                (number,) = _COUNT.unpack(self._wanted)
                if not 1 <= number <= MOST_FRAMES:
                    raise LaneError(f"{number} frames")
                self._wanted, self._at, self._stage = memoryview(bytearray(8 * number)), 0, "sizes"
            elif self._stage == "sizes":
                self._left = struct.unpack(f"<{len(self._wanted) // 8}Q", self._wanted)
                if self._left[0] > MAX_HEADER_BYTES or max(self._left) > self._largest:
                    raise LaneError(f"frames of {self._left} bytes")
                self._stage = "frames"
                self._next_frame()
            elif self._pieces:
                self._wanted, self._at = self._pieces.popleft(), 0
            elif self._left:
                self._next_frame()
            else:
                done = self._frames
                self._begin()
                return done
        return None

    def _next_frame(self) -> None:
        size, *left = self._left
        chosen = None
        if self.choose is not None and len(self._frames) == 1 and size >= LARGE_BYTES:
            chosen = self.choose(self._frames[0], self._left)
        if chosen is not None:
            assert sum(map(len, chosen)) == size, "the memory that was chosen has the size of the frame"
            self._frames.append(chosen[0])
            self._pieces.extend(chosen[1:])
            self._wanted = chosen[0]
        else:
            self._wanted = self._memory(size)
            self._frames.append(self._wanted)
        self._left, self._at = tuple(left), 0

    def _memory(self, size: int) -> memoryview:
        """Returns memory for a frame; large ones take turns in what is kept."""
        if size < LARGE_BYTES:
            return memoryview(bytearray(size))
        kept = self._kept.popleft() if len(self._kept) >= 2 else Room(0)
        if len(kept) != size:
            kept = Room(size)
        self._kept.append(kept)
        return memoryview(kept)


class _Writer:
    """Sends what fits and keeps the rest."""

    def __init__(self, lane: socket.socket) -> None:
        self._lane = lane
        self._parts: deque[memoryview] = deque()
        self._ends: deque[tuple[int, _OnItsWay]] = deque()
        self._put = self._sent = 0

    @property
    def waiting(self) -> int:
        """Returns how many messages have not left."""
        return len(self._ends)

    @property
    def large_waiting(self) -> int:
        """Returns how many large messages have not left."""
        return sum(way.large for _, way in self._ends)

    def put(self, frames: Sequence[Frame | Pieces]) -> _OnItsWay:
        """Appends a message."""
        sizes = _sizes(frames)
        for frame in (_head(sizes), *frames):
            for part in frame if isinstance(frame, Pieces) else (frame,):
                if len(part):
                    self._parts.append(memoryview(part).cast("B"))
                    self._put += len(part)
        way = _OnItsWay(max(sizes) >= LARGE_BYTES)
        self._ends.append((self._put, way))
        return way

    def flush(self) -> bool:
        """Sends what fits; True when nothing is left.

        Raises:
            OSError: The connection is gone.
        """
        while self._parts:
            try:
                count = self._lane.sendmsg(list(islice(self._parts, MOST_AT_ONCE)))
            except (BlockingIOError, InterruptedError):
                break
            self._sent += count
            while self._parts and count >= len(self._parts[0]):
                count -= len(self._parts.popleft())
            if count:
                self._parts[0] = self._parts[0][count:]
        while self._ends and self._ends[0][0] <= self._sent:
            self._ends.popleft()[1].done = True
        return not self._parts


@dataclass(slots=True, eq=False)
class _OnItsWay:
    """A message that may not have left yet."""

    large: bool
    done: bool = False


class LaneChannel:
    """A worker's lane to a ps task.

    Args:
        host: Where the ps task is.
        name: What its Welcome said: port and word.
        largest_bytes: The largest frame that it may send.

    Raises:
        OSError: It cannot be reached.
    """

    def __init__(self, host: str, name: str, largest_bytes: int) -> None:
        port, _, word = name.partition("/")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
        try:
            _prepare(self._socket)
            _widen(self._socket)
            self._socket.sendall(bytes.fromhex(word))
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._reader, self._writer = _Reader(largest_bytes), _Writer(self._socket)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(self._socket, select.POLLOUT)
        self.closed = False

    def receive_into(self, choose: Choose) -> None:
        """Lets the receiver choose, by the header of a message, where its second frame goes."""
        self._reader.choose = choose

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        """Sends a message; if it does not leave in time the connection is given up."""
        if self.closed:
            return
        try:
            self._writer.put(frames)
            deadline = time.monotonic() + SEND_S
            while not self._writer.flush():
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._writable.poll(left_s * 1000):
                    self.closed = True
                    return
        except OSError:
            self.closed = True

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message; the first moments are spent awake, giving the core to whoever wants it."""
        started = time.monotonic()
        deadline, awake_until = started + timeout_s, started + min(timeout_s, SPIN_S)
        while not self.closed:
            try:
                count = self._socket.recv_into(self._reader.room())
            except (BlockingIOError, InterruptedError):
                if time.monotonic() < awake_until:
                    os.sched_yield()
                    continue
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._poll.poll(left_s * 1000):
                    return None
                continue
            except OSError:
                count = 0
            if count == 0:
                self.closed = True
                break
            try:
                if (message := self._reader.took(count)) is not None:
                    return message
            except LaneError:
                self.closed = True
        time.sleep(min(timeout_s, 0.05))  # closed by the ps: do not turn every wait into a busy loop
        return None

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()


@dataclass(slots=True, eq=False)
class _Guest:
    peer: Peer
    socket: socket.socket
    reader: _Reader
    writer: _Writer
    since: float
    word: bytearray = field(default_factory=bytearray)
    let_in: bool = False


class LaneListener:
    """A ps task's end of its lanes; part of its listener, which polls the files and calls.

    Args:
        bind: The address to listen on; the port is any free one.
        largest_bytes: Whoever announces a larger frame is cut off.
        watch: Called with a file and whether it shall be polled for writing too; None when it is gone.
    """

    def __init__(self, bind: str, largest_bytes: int, watch: Callable[[int, bool | None], None]) -> None:
        self._largest, self._watch = largest_bytes, watch
        self._word = secrets.token_bytes(WORD_BYTES)
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            _widen(listening)
            listening.bind((bind, 0))
            listening.listen(128)
        except BaseException:
            listening.close()
            raise
        self._guests: dict[int, _Guest] = {}
        self._peers: dict[Peer, _Guest] = {}
        self._entered = self.turned_away = 0
        self._entrance = Entrance(listening, watch)

    @property
    def name(self) -> str:
        """Returns what a worker needs to come in."""
        return f"{self._entrance.port}/{self._word.hex()}"

    def owns(self, fd: int) -> bool:
        """Whether a file is one of ours."""
        return fd == self._entrance.fileno() or fd in self._guests

    def wake(self) -> None:
        """Lets people in again, if that rested because no file was left; to be called now and then."""
        self._entrance.wake()

    def ready(self, fd: int) -> tuple[Peer, list[Frame]] | None:
        """Something can be read from, or written to, one of our files; returns a message if one is complete."""
        if fd == self._entrance.fileno():
            self._let_in()
            return None
        guest = self._guests[fd]
        try:
            if guest.writer.waiting and guest.writer.flush():
                self._watch(fd, False)
            return self._read(guest)
        except (OSError, LaneError):
            self._forget(guest)
            return None

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message; a peer that is gone is no error, and one that does not read loses what does not fit."""
        guest = self._peers.get(peer)
        if guest is None:
            return None
        large = any(len(f) >= LARGE_BYTES for f in frames)
        if guest.writer.large_waiting >= LARGE_AHEAD if large else guest.writer.waiting >= SMALL_AHEAD:
            return None  # it has not taken what it asked for before; it will ask again
        idle = not guest.writer.waiting
        way = guest.writer.put(frames)
        try:
            if idle and not guest.writer.flush():
                self._watch(guest.socket.fileno(), True)
        except OSError:
            self._forget(guest)
            return None
        return None if way.done else way

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that talks too much."""
        if (guest := self._peers.get(peer)) is not None:
            self._forget(guest)

    def close(self) -> None:
        """Closes everything."""
        for guest in list(self._guests.values()):
            self._forget(guest)
        self._entrance.close()

    def _let_in(self) -> None:
        lane = self._entrance.accept()
        if lane is None:
            return
        now = time.monotonic()
        strangers = [g for g in self._guests.values() if not g.let_in]
        for guest in strangers:
            if now - guest.since > STRANGER_S or len(strangers) >= MOST_STRANGERS:
                self.turned_away += 1
                self._forget(guest)
        lane.setblocking(False)
        _prepare(lane)
        self._entered += 1
        peer = PREFIX + str(self._entered).encode()
        self._guests[lane.fileno()] = _Guest(peer, lane, _Reader(self._largest), _Writer(lane), now)
        self._watch(lane.fileno(), False)

    def _read(self, guest: _Guest) -> tuple[Peer, list[Frame]] | None:
        while True:
            try:
                if not guest.let_in:
                    if not self._check_word(guest):
                        return None
                    continue
                count = guest.socket.recv_into(guest.reader.room())
            except (BlockingIOError, InterruptedError):
                return None
            if count == 0:
                self._forget(guest)
                return None
            if (message := guest.reader.took(count)) is not None:
                return guest.peer, message

    def _check_word(self, guest: _Guest) -> bool:
        """Reads the word that a newcomer must say; False if he is gone."""
        said = guest.socket.recv(WORD_BYTES - len(guest.word))
        guest.word += said
        if said and len(guest.word) < WORD_BYTES:
            return True
        if not hmac.compare_digest(bytes(guest.word), self._word):
            self.turned_away += 1
            self._forget(guest)
            return False
        guest.let_in = True
        self._peers[guest.peer] = guest
        return True

    def _forget(self, guest: _Guest) -> None:
        self._watch(guest.socket.fileno(), None)
        self._guests.pop(guest.socket.fileno(), None)
        self._peers.pop(guest.peer, None)
        for _, way in guest.writer._ends:
            way.done = True
        guest.socket.close()
