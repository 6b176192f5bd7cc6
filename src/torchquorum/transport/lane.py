"""The fast way to a ps task on another host: a plain TCP connection for gradients and variables, beside ZeroMQ's.

ZeroMQ hands every message to a thread of its own, into memory of its own; for a megabyte that costs more than the network
of one host does. On a lane the task's own thread sends from where the bytes lie and receives into memory that is used
again. Only where the cluster has no secret: a lane does not encrypt. Its port is told in the ps's Welcome together with
a word that whoever comes must say first; who cannot reach it goes on with ZeroMQ.

A frame may be sent from several pieces of memory, and received into memory that the receiver chooses when it has seen the
header, so that gradients leave from where they were computed and variables arrive where they are used.

Here are messages as bytes, and a worker's end; the ps task's is in `lane_listener`. What always holds: a received large
frame is valid until the next but one message of the same connection.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torchquorum.transport.codec import MAX_HEADER_BYTES, Frame

PREFIX = b"\0lane/"  # nobody may give himself a ZeroMQ identity with a zero in front
WORD_BYTES = 32
MOST_FRAMES = 16
LARGE_BYTES = 64 << 10
CONNECT_S = 2.0
SEND_S = 10.0
MOST_AT_ONCE = 512  # pieces of memory; the system has a limit of its own, 1024
BUFFER_BYTES = 4 << 20
SPIN_S = 0.004
_COUNT = struct.Struct("<I")


def prepare(lane: socket.socket) -> None:
    """Has small messages sent at once, and a host that is gone noticed."""
    lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lane.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def widen(lane: socket.socket) -> None:
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


class Reader:
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

    @property
    def wanted_bytes(self) -> int:
        """Returns the size of the frame that is being read; 0 if there is none yet."""
        return len(self._wanted) if self._stage == "frames" else 0

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


class Writer:
    """Sends what fits and keeps the rest; one thread may put messages in while another, always the same, sends them."""

    def __init__(self, lane: socket.socket) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._parts: deque[memoryview] = deque()
        self._ends: deque[tuple[int, OnItsWay]] = deque()
        self._put = self._sent = 0

    @property
    def waiting(self) -> int:
        """Returns how many messages have not left."""
        return len(self._ends)

    @property
    def large_waiting(self) -> int:
        """Returns how many large messages have not left."""
        with self._lock:
            return sum(way.large for _, way in self._ends)

    def put(self, frames: Sequence[Frame | Pieces]) -> OnItsWay:
        """Appends a message."""
        sizes = _sizes(frames)
        way = OnItsWay(max(sizes) >= LARGE_BYTES)
        with self._lock:
            for frame in (_head(sizes), *frames):
                for part in frame if isinstance(frame, Pieces) else (frame,):
                    if len(part):
                        self._parts.append(memoryview(part).cast("B"))
                        self._put += len(part)
            self._ends.append((self._put, way))
        return way

    def flush(self) -> bool:
        """Sends what fits; True when nothing is left.

        Raises:
            OSError: The connection is gone.
        """
        while True:
            with self._lock:
                parts = list(islice(self._parts, MOST_AT_ONCE))
            if not parts:
                return True
            try:
                count = self._lane.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                return False
            with self._lock:
                self._have_left(count)

    def _have_left(self, count: int) -> None:
        self._sent += count
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.popleft())
        if count:
            self._parts[0] = self._parts[0][count:]
        while self._ends and self._ends[0][0] <= self._sent:
            self._ends.popleft()[1].done = True

    def give_up(self) -> None:
        """The connection is gone: nobody waits for what was to be sent."""
        with self._lock:
            for _, way in self._ends:
                way.done = True


@dataclass(slots=True, eq=False)
class OnItsWay:
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
            prepare(self._socket)
            widen(self._socket)
            self._socket.sendall(bytes.fromhex(word))
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._reader, self._writer = Reader(largest_bytes), Writer(self._socket)
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
