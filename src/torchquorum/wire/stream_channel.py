"""A worker's end of a stream of messages, over a Unix socket, TCP, or whatever else is a `ByteStream`.

Made by a transport (`unix_stream`, `tcp_stream`), owned by the worker's thread. What always holds: a message is sent as a whole or the
connection is given up; a `receive` without time to wait costs one system call.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.channel import FOREVER_S, Choose, Pieces
from torchquorum.wire.codec import Frame
from torchquorum.wire.stream import ByteStream, StreamError, StreamReader, StreamWriter, WantWrite

SEND_S = 10.0
CLOSED_NAP_S = 0.05


class StreamChannel:
    """A worker's connection to a ps task.

    Args:
        stream: The connection, which this channel owns from now on.
        largest_bytes: The largest frame that may come.
        reuse: Whether the memory of a large frame is used again, by the next but one message.
        spin_s: So long a receiver looks again and again, giving the core to others, before it sleeps.
        send_s: A message that has not left after this time ends the connection.
        clock: Tells the time.
    """

    def __init__(
        self,
        stream: ByteStream,
        largest_bytes: int,
        *,
        reuse: bool = True,
        spin_s: float = 0.0,
        send_s: float = SEND_S,
        clock: Clock = SYSTEM,
    ) -> None:
        self._stream, self._clock = stream, clock
        self._spin_s, self._send_s = spin_s, send_s
        self._reader, self._writer = StreamReader(largest_bytes, reuse=reuse), StreamWriter(stream)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(stream.fileno(), select.POLLIN)
        self._writable.register(stream.fileno(), select.POLLOUT)
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

    def receive_into(self, choose: Choose) -> None:
        """Lets the receiver choose, by header and sizes of a message, where its second frame goes."""
        self._reader.choose = choose

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        """Sends a message; if it does not leave in time the connection is given up."""
        if self.closed:
            return
        try:
            if self._writer.send(frames) is None:
                return
            deadline = self._clock.now() + self._send_s
            while not self._writer.flush():
                left_s = deadline - self._clock.now()
                poll = self._readable if self._writer.wants_read else self._writable
                if left_s <= 0 or not poll.poll(left_s * 1000):
                    self.closed = True
                    return
        except OSError:
            self.closed = True

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time."""
        deadline, awake_until = None, 0.0
        while not self.closed:
            poll = self._readable
            try:
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
        self._stream.close()
