"""A worker's end of a stream of messages, over a Unix socket, TCP, or whatever else is a `ByteStream`.

Made by a transport (`unix_stream`, `tcp_stream`), owned by the worker's thread. What always holds: messages leave whole and in order,
however long the link takes: nothing here gives a slow connection up; a `receive` without time to wait costs one system call.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.channel import FOREVER_S, Choose, Pieces, Progress
from torchquorum.wire.codec import Frame
from torchquorum.wire.stream import ByteStream, StreamError, StreamReader, StreamWriter, WantWrite

CLOSED_NAP_S = 0.05


class StreamChannel:
    """A worker's connection to a ps task.

    Args:
        stream: The connection, which this channel owns from now on.
        largest_bytes: The largest frame that may come.
        reuse: Whether the memory of a large frame is used again, by the next but one message.
        spin_s: So long a receiver looks again and again, giving the core to others, before it sleeps.
        clock: Tells the time.
    """

    def __init__(
        self,
        stream: ByteStream,
        largest_bytes: int,
        *,
        reuse: bool = True,
        spin_s: float = 0.0,
        clock: Clock = SYSTEM,
    ) -> None:
        self._stream, self._clock = stream, clock
        self._spin_s = spin_s
        self._reader, self._writer = StreamReader(largest_bytes, reuse=reuse), StreamWriter(stream)
        self._readable, self._writable, self._both = select.poll(), select.poll(), select.poll()
        self._readable.register(stream.fileno(), select.POLLIN)
        self._writable.register(stream.fileno(), select.POLLOUT)
        self._both.register(stream.fileno(), select.POLLIN | select.POLLOUT)
        self.closed = False

    def settled(self) -> StreamChannel:
        """Returns this channel; from now on the memory of large frames is used again."""
        self._reader.reuse = True
        return self

    def fileno(self) -> int:
        """Returns the connection's descriptor."""
        return self._stream.fileno()

    def may_wait_s(self) -> float:
        """Returns 0.0 if bytes are here that have not been looked at, which the descriptor need not show."""
        return 0.0 if self._reader.more else FOREVER_S

    def receive_into(self, choose: Choose, *, several: bool = False) -> None:
        """Lets the receiver choose, by header and sizes of a message, where its second frame goes; see the protocol for `several`."""
        self._reader.choose = choose
        if several:
            self._reader.reuse = False

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        """Sends a message as far as it fits; the rest leaves while this channel is flushed or received from."""
        if self.closed:
            return
        try:
            self._writer.send(frames)
        except OSError:
            self.closed = True

    def flush(self, timeout_s: float) -> bool:
        """Sends what did not fit, as far as that goes in this time; returns whether nothing is left."""
        deadline = None
        while self._writer.waiting and not self.closed:
            try:
                if self._writer.flush():
                    break
            except OSError:
                self.closed = True
                break
            now = self._clock.now()
            deadline = now + timeout_s if deadline is None else deadline
            poll = self._readable if self._writer.wants_read else self._writable
            if now >= deadline or not poll.poll((deadline - now) * 1000):
                return False
        return True

    def progress(self) -> Progress:
        """Returns what has moved."""
        writer, reader = self._writer, self._reader
        leaving = writer.leaving
        return Progress(reader.received, writer.delivered, leaving, *reader.coming)

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time. Sends what did not fit meanwhile."""
        deadline, awake_until = None, 0.0
        while not self.closed:
            poll = self._readable
            try:
                if self._writer.waiting and not self._writer.flush() and not self._writer.wants_read:
                    poll = self._both
                return self._reader.read(self._stream)
            except WantWrite:
                poll = self._writable
            except BlockingIOError:
                pass
            except (OSError, StreamError):
                self.closed = True
                break
            if timeout_s <= 0:
                return None
            now = self._clock.now()
            if deadline is None:
                deadline = now + timeout_s
                awake_until = now + min(timeout_s, self._spin_s)
            if now < awake_until:
                os.sched_yield()
            elif now >= deadline or not poll.poll((deadline - now) * 1000):
                return None
        self._clock.sleep(min(timeout_s, CLOSED_NAP_S))  # or every wait for a ps that is gone would be a busy loop
        return None

    def close(self) -> None:
        """Closes this end."""
        self._writer.give_up()
        self._stream.close()
