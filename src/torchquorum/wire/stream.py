"""Messages as bytes on a stream, and back: the framing that Unix sockets and TCP share, whatever carries the bytes.

A message is a little-endian uint32 with the number of frames, a uint64 with the size of each, then the frames. Used by
`stream_channel` and `stream_listener`. Bytes go through a `ByteStream`: a socket, or something with its manners, as TLS would be.

What always holds: limits are checked before memory is taken; a small message costs one read; a large frame is read into the memory
where it stays, and stays valid until the next but one message of the same connection.
"""

from __future__ import annotations

import fcntl
import mmap
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Protocol

from torchquorum.wire.channel import Choose, Pieces
from torchquorum.wire.codec import MAX_HEADER_BYTES, Frame

MOST_FRAMES = 16
LARGE_BYTES = 64 << 10
STAGE_BYTES = 16 << 10  # read at once; of a large frame that much is copied, the rest is received where it stays
AT_ONCE_BYTES = 64 << 20
MOST_PARTS = 512  # pieces of memory in one system call; the system allows 1024
_COUNT = struct.Struct("<I")
_QUEUED = struct.Struct("i")
_HEADS = [struct.Struct(f"<I{count}Q") for count in range(MOST_FRAMES + 1)]
_NONE = range(0)


class StreamError(Exception):
    """What came on a stream is not a message."""


class WantRead(BlockingIOError):
    """A write cannot go on before something can be read, as in TLS."""


class WantWrite(BlockingIOError):
    """A read cannot go on before something can be written, as in TLS."""


class ByteStream(Protocol):
    """What carries the bytes; never blocks.

    A read or write that cannot go on raises BlockingIOError; WantWrite or WantRead if it waits for the other direction.
    """

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        ...

    def recv_into(self, buffer: memoryview | bytearray, /) -> int:
        """Reads into a buffer; returns how many bytes, 0 at the end of the stream."""
        ...

    def sendmsg(self, parts: Iterable[Frame], /) -> int:
        """Writes from several pieces of memory; returns how many bytes."""
        ...

    def pending(self) -> int:
        """Returns how many bytes have been taken from the system and not been read yet; polling does not show them."""
        ...

    def unacknowledged(self) -> int:
        """Returns how many written bytes have not reached the other side's system yet; 0 where that is not known."""
        ...

    def close(self) -> None:
        """Closes it."""
        ...


def unacknowledged(fd: int) -> int:
    """Returns how many bytes that were written to a socket have not reached the other side's system yet."""
    try:
        return _QUEUED.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(_QUEUED.size)))[0]
    except (OSError, ValueError):
        return 0  # it is closed


class SocketStream(socket.socket):
    """A socket as a ByteStream: all its bytes are in the system."""

    __slots__ = ()

    def pending(self) -> int:
        """Returns 0."""
        return 0

    def unacknowledged(self) -> int:
        """Returns how many written bytes have not reached the other side's system yet."""
        return unacknowledged(self.fileno())

    @classmethod
    def of(cls, plain: socket.socket) -> SocketStream:
        """Returns a connected socket as a stream that does not block; the given object is not used any more."""
        stream = cls(fileno=plain.detach())
        stream.setblocking(False)
        return stream


class Room(mmap.mmap):
    """Memory for a large frame, used again; who has cut it into views may keep them here. What was only announced costs nothing."""

    cut: object

    def __new__(cls, size: int) -> Room:
        """Returns so much memory."""
        made = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made.cut = None
        return made


class StreamReader:
    """Puts messages together as their bytes come.

    Args:
        largest_bytes: The largest frame that may come.
        choose: Given the header and the sizes of the other frames, returns memory for the first of those, in pieces, or None.
        reuse: Whether the memory of a large frame is used again, by the next but one message with such a frame.

    Attributes:
        received: How many bytes have come so far.
    """

    def __init__(self, largest_bytes: int, choose: Choose | None = None, *, reuse: bool = True) -> None:
        self._largest, self.choose, self.reuse = largest_bytes, choose, reuse
        self._stage = bytearray(STAGE_BYTES)
        self._begin = self._end = 0  # of what is in the stage and belongs to no frame yet
        self._sizes: tuple[int, ...] = ()
        self._frames: list[Frame] = []
        self._target: memoryview | None = None  # of a frame that is not complete; the pieces that follow it
        self._pieces: deque[memoryview] = deque()
        self._at = 0
        self._kept: deque[Room] = deque()
        self.more = False
        self.received = 0
        self._message_at = 0  # how many bytes had come before the frames of the message that is being read

    @property
    def coming(self) -> tuple[int, int]:
        """Returns the size of the message that is being read, and how much of it has come; zeros if there is none yet."""
        here = self.received - (self._end - self._begin)
        return (sum(self._sizes), here - self._message_at) if self._sizes else (0, 0)

    @property
    def wanted_bytes(self) -> int:
        """Returns the size of the frame that is being read; 0 if there is none yet."""
        return len(self._target) if self._target is not None else 0

    def read(self, stream: ByteStream, leave: range = _NONE) -> list[Frame] | None:
        """Returns the next message; None after one look at a frame whose size is in `leave`. `more` tells of bytes not looked at.

        Raises:
            BlockingIOError: The message is not complete, and no more bytes are here.
            ConnectionResetError: The stream has ended.
            StreamError: What came is not a message.
            OSError: The connection is gone.
        """
        count = 0
        while True:
            if self._begin == self._end and self._target is None:
                self._begin, self._end, self.more = 0, 0, False  # nothing is here: one read may bring a whole message
                count = self._end = stream.recv_into(self._stage)
            elif (message := self._parse()) is not None:
                self.more = self._begin < self._end or stream.pending() > 0
                return message
            elif count and self.wanted_bytes in leave:
                return None
            else:
                self.more = False
                count = self._read_on(stream)
            if count == 0:
                raise ConnectionResetError
            self.received += count

    def _read_on(self, stream: ByteStream) -> int:
        """Reads into the frame that is not complete, or behind what is in the stage."""
        if self._target is not None:
            count = stream.recv_into(self._target[self._at :])
            self._at += count
            return count
        left = self._end - self._begin
        self._stage[:left] = self._stage[self._begin : self._end]
        self._begin, self._end = 0, left
        count = stream.recv_into(memoryview(self._stage)[left:])
        self._end += count
        return count

    def _parse(self) -> list[Frame] | None:
        """Returns a message if its end is here. Otherwise what is here has been looked at, and more bytes are needed."""
        if self._target is not None and not self._fill():
            return None
        sizes, frames = self._sizes, self._frames
        if not sizes and not (sizes := self._head()):
            return None
        while len(frames) < len(sizes):
            begin = self._begin
            end = begin + sizes[len(frames)]
            if end <= self._end:
                frames.append(bytes(self._stage[begin:end]))
                self._begin = end
            elif not self._begin_frame(sizes[len(frames)]):
                return None
        self._frames, self._sizes = [], ()
        return frames

    def _head(self) -> tuple[int, ...]:
        """Reads the sizes of the frames; nothing if they are not all here."""
        here = self._end - self._begin
        if here < _COUNT.size:
            return ()
        (number,) = _COUNT.unpack_from(self._stage, self._begin)
        if not 1 <= number <= MOST_FRAMES:
            raise StreamError(f"{number} frames")
        head = _HEADS[number]
        if here < head.size:
            return ()
        sizes = head.unpack_from(self._stage, self._begin)[1:]
        if sizes[0] > MAX_HEADER_BYTES or max(sizes) > self._largest:
            raise StreamError(f"frames of {sizes} bytes")
        self._begin += head.size
        self._sizes = sizes
        self._message_at = self.received - (self._end - self._begin)
        return sizes

    def _begin_frame(self, size: int) -> bool:
        """Finds memory for a frame that is not here as a whole, and moves what is here there; returns whether that was all."""
        chosen = None
        if self.choose is not None and len(self._frames) == 1 and size >= LARGE_BYTES:
            chosen = self.choose(self._frames[0], self._sizes[1:])
        if chosen is None:
            target = self._memory(size)
        else:
            assert sum(map(len, chosen)) == size, "the memory that was chosen has the size of the frame"
            target = chosen[0]
            self._pieces.extend(chosen[1:])
        self._frames.append(target)
        self._target, self._at = target, 0
        return self._fill()

    def _fill(self) -> bool:
        """Moves staged bytes into the frame that is being read; returns whether it is complete."""
        while self._target is not None:
            count = min(self._end - self._begin, len(self._target) - self._at)
            if count:
                staged = memoryview(self._stage)[self._begin : self._begin + count]
                self._target[self._at : self._at + count] = staged
                self._at += count
                self._begin += count
            if self._at < len(self._target):
                return False
            self._target = self._pieces.popleft() if self._pieces else None
            self._at = 0
        return True

    def _memory(self, size: int) -> memoryview:
        """Returns memory for a frame; large ones take turns in what is kept."""
        if size < LARGE_BYTES:
            return memoryview(bytearray(size))
        if not self.reuse or sum(each >= LARGE_BYTES for each in self._sizes) > 1:
            return memoryview(Room(size))  # all frames of a message are there at a time
        kept = self._kept.popleft() if len(self._kept) >= 2 else None
        if kept is None or len(kept) != size:
            self._give_back(kept)
            kept = Room(size)
        self._kept.append(kept)
        return memoryview(kept)

    def close(self) -> None:
        """Gives its memory back, as far as nobody uses it."""
        while self._kept:
            self._give_back(self._kept.popleft())

    def _give_back(self, room: Room | None) -> None:
        if room is not None:
            room.cut = None  # views that it keeps of itself would keep it for ever


def pack(frames: Sequence[Frame | Pieces]) -> list[Frame]:
    """Returns a message as what is sent one after another: the sizes, and the memory of the frames."""
    sizes: list[int] = []
    parts: list[Frame] = [b""]
    for frame in frames:
        if isinstance(frame, Pieces):
            sizes.append(frame.size_bytes())
            parts += frame
        else:
            sizes.append(len(frame))
            parts.append(frame)
    parts[0] = _HEADS[len(sizes)].pack(len(sizes), *sizes)
    return parts


class Outgoing:
    """A message that is being sent: its memory must not change before it is done.

    Args:
        parts: Its bytes.
        size: How many they are.
        end: How many bytes its writer will have written when it is done.
        writer: What sends it.
    """

    __slots__ = ("_end", "_writer", "done", "large", "parts")

    def __init__(self, parts: Sequence[Frame], size: int, end: int, writer: StreamWriter) -> None:
        self.parts = deque(parts)
        self.large = size >= LARGE_BYTES
        self.done = False
        self._end, self._writer = end, writer

    @property
    def on_its_way(self) -> bool:
        """Whether some of it has not reached the other side's system yet; of a connection that is gone nothing is on its way."""
        return self._writer.delivers(self._end)

    def sent(self, count: int) -> int:
        """So many bytes have left, of this message and perhaps of later ones; returns how many were of later ones."""
        parts = self.parts
        while parts and count >= len(parts[0]):
            count -= len(parts.popleft())
        if not parts:
            self.done = True
        elif count:
            parts[0] = memoryview(parts[0])[count:]
            count = 0
        return count


class StreamWriter:
    """Sends what fits and keeps the rest. Any thread may `put` a message; one thread, always the same, sends and flushes.

    Attributes:
        wants_read: Whether what is left waits until something can be read, instead of written.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._queue: deque[Outgoing] = deque()
        self._accepted = self._written = 0  # bytes of messages that were to be sent, and of those the system has taken
        self._gone = False
        self.wants_read = False

    @property
    def delivered(self) -> int:
        """Returns how many bytes have reached the other side's system."""
        return self._written - self._unacknowledged()

    @property
    def leaving(self) -> int:
        """Returns how many bytes have not."""
        return 0 if self._gone else self._accepted - self._written + self._unacknowledged()

    def delivers(self, end: int) -> bool:
        """Whether the first `end` bytes have not all reached the other side's system, and still may."""
        return not self._gone and self._written - self._unacknowledged() < end

    def _unacknowledged(self) -> int:
        return 0 if self._gone else self._stream.unacknowledged()

    @property
    def waiting(self) -> int:
        """Returns how many messages have not left."""
        return len(self._queue)

    @property
    def large_waiting(self) -> int:
        """Returns how many large messages have not left."""
        with self._lock:
            return sum(message.large for message in self._queue)

    def put(self, frames: Sequence[Frame | Pieces]) -> Outgoing:
        """Appends a message, to be sent by the next `flush`."""
        parts = pack(frames)
        size = sum(map(len, parts))
        with self._lock:
            self._accepted += size
            message = Outgoing(parts, size, self._accepted, self)
            self._queue.append(message)
        return message

    def send(self, frames: Sequence[Frame | Pieces]) -> Outgoing | None:
        """Sends a message as far as it fits now; returns it if it is large, or if something of it is left.

        Raises:
            OSError: The connection is gone.
        """
        if self._queue:
            message = self.put(frames)
        else:
            parts = pack(frames)
            size = sum(map(len, parts))
            with self._lock:
                self._accepted += size
                end = self._accepted
            count = self._write(parts if len(parts) <= MOST_PARTS else parts[:MOST_PARTS])
            if count == size < LARGE_BYTES:
                return None
            message = Outgoing(parts, size, end, self)
            message.sent(count)
            if message.done:
                return message
            with self._lock:
                self._queue.appendleft(message)  # what another thread has put in meanwhile comes after it
        self.flush()
        return None if message.done and not message.large else message

    def flush(self) -> bool:
        """Sends what fits, and not too much at a time, so that its thread looks up also on a fast link; True when nothing is left.

        Raises:
            OSError: The connection is gone.
        """
        most = self._written + AT_ONCE_BYTES
        while self._queue:
            if self._written >= most:
                return False
            with self._lock:
                parts = list(islice(chain.from_iterable(message.parts for message in self._queue), MOST_PARTS))
            count = self._write(parts)
            if not count:
                return False
            with self._lock:
                while self._queue:
                    count = self._queue[0].sent(count)
                    if not self._queue[0].done:
                        break
                    self._queue.popleft()
        return True

    def _write(self, parts: Iterable[Frame]) -> int:
        """Returns how many bytes were taken, 0 if none now."""
        try:
            count = self._stream.sendmsg(parts)
        except BlockingIOError as want:
            self.wants_read = isinstance(want, WantRead)
            return 0
        self.wants_read = False
        self._written += count
        return count

    def give_up(self) -> None:
        """The connection is gone: what was to be sent is free."""
        self._gone = True
        with self._lock:
            for message in self._queue:
                message.done = True
