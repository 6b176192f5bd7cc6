"""One connection of a ps task's stream listener, and the thread that may own it.

What always holds: a connection is read and written by one thread, the ps thread until it gets a thread of its own.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from torchquorum.wire.channel import Peer, Take
from torchquorum.wire.codec import Frame
from torchquorum.wire.stream import ByteStream, StreamError, StreamReader, StreamWriter, WantWrite

END_S = 5.0
PEERS = b"\0stream-"  # what the names of peers begin with
_NONE = range(0)


class StreamConnection:
    """A connection of a peer.

    Args:
        peer: Its name.
        stream: Its bytes.
        largest_bytes: The largest frame that may come.
        reuse: Whether memory of large frames is used again.
    """

    __slots__ = ("fd", "peer", "polled_for", "reader", "stream", "thread", "wants_write", "writer")

    def __init__(self, peer: Peer, stream: ByteStream, largest_bytes: int, *, reuse: bool = True) -> None:
        self.peer, self.stream = peer, stream
        self.fd = stream.fileno()
        self.reader, self.writer = StreamReader(largest_bytes, reuse=reuse), StreamWriter(stream)
        self.polled_for = select.EPOLLIN
        self.thread: StreamThread | None = None
        self.wants_write = False

    def read(self, leave: range = _NONE) -> list[Frame] | None:
        """Returns the message whose end has come, None if there is none yet or a frame has begun whose size is in `leave`.

        Raises:
            OSError: The connection is gone.
            StreamError: What came is not a message.
        """
        self.wants_write = False
        try:
            return self.reader.read(self.stream, leave)
        except WantWrite:
            self.wants_write = True
        except BlockingIOError:
            pass
        return None

    def events(self) -> int:
        """Returns what to poll for."""
        writes = self.wants_write or (self.writer.waiting and not self.writer.wants_read)
        return select.EPOLLIN | select.EPOLLOUT if writes else select.EPOLLIN

    def close(self) -> None:
        """Closes it; what was to be sent is free."""
        self.writer.give_up()
        self.reader.close()
        self.stream.close()


class StreamThread:
    """A thread that receives what one peer sends, has it handled and sends what is put into the connection's writer.

    Args:
        connection: The connection, which it owns from now on.
        take: Handles a message, on this thread.
        gone: Called on this thread when the connection has ended.

    Raises:
        OSError: No descriptor is left to wake it with.
        RuntimeError: No thread can be started.
    """

    def __init__(self, connection: StreamConnection, take: Take, gone: Callable[[StreamConnection], None]) -> None:
        self._connection, self._take, self._gone = connection, take, gone
        self._closing = self._over = False
        self._lock = threading.Lock()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        which = connection.peer.removeprefix(PEERS).decode()
        self._thread = threading.Thread(target=self._run, name=f"torchquorum-stream-{which}", daemon=True)
        connection.thread = self
        try:
            self._thread.start()
        except BaseException:
            connection.thread = None
            os.close(self._woken)
            raise

    def wake(self) -> None:
        """Something is to be sent; may be called on any thread."""
        if self._thread is not threading.current_thread():
            with self._lock:
                if not self._over:
                    os.eventfd_write(self._woken, 1)

    def end(self) -> None:
        """Ends the connection, after what can be sent at once; may be called on any thread."""
        self._closing = True
        self.wake()

    def alive(self) -> bool:
        """Whether the thread has not ended yet."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Waits for the end."""
        self._thread.join(END_S)

    def _run(self) -> None:
        try:
            self._serve()
        except (OSError, StreamError):
            pass  # the connection is gone, or is given up
        finally:
            with self._lock:
                self._over = True
                os.close(self._woken)
            self._connection.close()
            self._gone(self._connection)

    def _serve(self) -> None:
        connection = self._connection
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while not self._closing:
            message = connection.read()
            if message is not None:
                self._take(connection.peer, message)
            connection.writer.flush()
            if message is not None:
                continue  # there may be more; a peer that never pauses must be answered, and closed, like others
            poll.register(connection.fd, connection.events())  # the constants of poll and epoll are the same
            for ready, _ in poll.poll():
                if ready == self._woken:
                    os.eventfd_read(self._woken)
        connection.writer.flush()
