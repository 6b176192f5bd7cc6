"""A channel to a task at its address: it connects by itself, and again when the connection is lost.

Used by whatever talks to a task that may not be up yet, or may be restarted: workers that greet, beats, watchers, clients, ps tasks that
follow. Owned by one thread. What always holds: no call waits for the other task longer than it was told to; a message is delivered at most
once; a peer that will never let us in is an error that says why.
"""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from collections.abc import Sequence

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.errors import ClusterError, SecretError
from torchquorum.wire.address import find_place, largest_frame_bytes
from torchquorum.wire.channel import UNKNOWN, Channel, Choose, Pieces, Progress, whole
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import PROTOCOL
from torchquorum.wire.opening import ChannelOpening, RefusedConnection
from torchquorum.wire.refusals import NO_SECRET, OTHER_PROTOCOL, OTHER_VERSION, UNEXPECTED_SECRET, WRONG_SECRET, ZEROMQ
from torchquorum.wire.stream import LARGE_BYTES, SocketStream, WantWrite
from torchquorum.wire.stream_channel import StreamChannel
from torchquorum.wire.tcp_stream import SPIN_S, prepare, widen
from torchquorum.wire.tls_keys import connecting_side

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
OPENING_S = 30.0
MOST_KEPT = 16
_UNDER_WAY = (errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK)


class EntryChannel:
    """A connection to one task that listens.

    Args:
        address: Where it listens, host:port.
        access: The secret, if the cluster has one.
        who: The task's name, for messages.
        clock: Tells the time.
        silence_s: A connection on which nothing comes for so long, though something was sent, is given up for a new one: after a cut
            the system may wait for as long as that lasted before it sends again.

    Raises:
        ClusterError: There is no such host, or no file descriptor is left.
    """

    closed = False  # it connects again by itself

    def __init__(
        self,
        address: str,
        access: Access = OPEN,
        who: str = "the task",
        clock: Clock = SYSTEM,
        silence_s: float | None = None,
    ) -> None:
        self._where, self._clock = f"{who} ({address})", clock
        self._side = connecting_side(access.secret) if access.secret is not None else None
        self._family, self._place = find_place(address)
        self._kept: deque[list[Frame]] = deque(maxlen=MOST_KEPT)  # what was sent before there was a connection
        self._socket: socket.socket | None = None  # that connects, or opens
        self._opening: ChannelOpening | None = None
        self._channel: StreamChannel | None = None
        self._since = 0.0
        self._silence_s, self._asked_at, self._heard_bytes = silence_s, 0.0, -1
        self._next_try, self._pause_s = clock.now(), FIRST_PAUSE_S
        try:
            self._epoll = select.epoll()
        except OSError as error:
            raise self._no_file(error) from None
        try:
            self._dial(clock.now())  # and no more: what the other side says to that is heard where it is waited for
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Returns a descriptor that shows when something has come, or the connection can go on; it stays the same."""
        return self._epoll.fileno()

    def may_wait_s(self) -> float:
        """Returns how long the descriptor alone may be waited for."""
        if self._channel is not None:
            return self._channel.may_wait_s()
        until = self._next_try if self._socket is None else self._since + OPENING_S
        return max(0.0, until - self._clock.now())

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now, on which the other side has let us in."""
        return self._channel is not None

    def receive_into(self, choose: Choose, *, several: bool = False) -> None:
        """Does nothing: what comes here stays as it is, as long as somebody uses it."""

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        """Sends a message; without a connection, small ones are kept for it."""
        self._advance()
        if self._channel is not None:
            self._give_up_silent(self._channel)
        if self._channel is not None:
            self._channel.send(frames)
            self._is_open()
        elif sum(map(len, packed := whole(frames))) < LARGE_BYTES and packed not in self._kept:
            self._kept.append([bytes(frame) for frame in packed])

    def flush(self, timeout_s: float) -> bool:
        """Sends what did not fit, as far as that goes in this time; returns whether nothing is left."""
        flushed = self._channel is None or self._channel.flush(timeout_s)
        self._is_open()
        return flushed

    def progress(self) -> Progress:
        """Returns what has moved on the connection that there is now."""
        return self._channel.progress() if self._channel is not None else UNKNOWN

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time.

        Raises:
            SecretError: The other side does not let us in, or runs without a secret where we have one.
            ClusterError: It is another version of torchquorum, or no task of torchquorum.
        """
        deadline = None
        while True:
            self._advance()
            left_s = 0.0
            if timeout_s > 0:
                now = self._clock.now()
                deadline = now + timeout_s if deadline is None else deadline
                left_s = max(0.0, deadline - now)
            if self._channel is not None:
                message = self._channel.receive(left_s)
                if self._is_open() or message is not None:
                    return message
            elif left_s > 0:
                self._epoll.poll(min(left_s, self.may_wait_s() + 0.001))
            if left_s <= 0:
                return None

    def settled(self) -> Channel:
        """Returns the connection itself, which is not made again when it is lost; this channel is given up."""
        channel, self._channel = self._channel, None
        self.close()
        if channel is None:  # lost, just now: it is one that has been closed
            ours, theirs = socket.socketpair()
            theirs.close()
            channel = StreamChannel(SocketStream.of(ours), largest_frame_bytes(), clock=self._clock)
            channel.closed = True
        return channel.settled()

    def close(self) -> None:
        """Closes this end."""
        self._drop()
        if not self._epoll.closed:
            self._epoll.close()

    # -- the connection -----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Goes on with connecting, as far as that goes without waiting."""
        if self._channel is not None:
            return
        now = self._clock.now()
        connecting_s = self._silence_s if self._opening is None and self._silence_s is not None else OPENING_S
        if self._socket is not None and now - self._since > connecting_s:
            self._lost()
        if self._socket is None:
            if now < self._next_try:
                return
            self._dial(now)
        if self._socket is not None:
            self._open(self._socket)

    def _dial(self, now: float) -> None:
        try:
            made = socket.socket(self._family, socket.SOCK_STREAM)
        except OSError as error:
            raise self._no_file(error) from None
        self._socket, self._since = made, now
        made.setblocking(False)
        widen(made)
        prepare(made)
        self._epoll.register(made.fileno(), select.EPOLLOUT)
        failed = made.connect_ex(self._place)
        if failed and failed not in _UNDER_WAY:
            self._lost()

    def _open(self, plain: socket.socket) -> None:
        try:
            if self._opening is None:
                if not self._epoll.poll(0.0):
                    return  # the connection is not there yet
                if plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._lost()
                    return
                self._opening = ChannelOpening(plain, self._side)
            stream = self._opening.advance()
        except BlockingIOError as want:
            self._epoll.modify(plain.fileno(), select.EPOLLOUT if isinstance(want, WantWrite) else select.EPOLLIN)
            return
        except RefusedConnection as refused:
            self._lost()
            self._explain(refused.why)
            return
        except OSError:
            self._lost()
            return
        self._epoll.modify(stream.fileno(), select.EPOLLIN)
        self._channel = StreamChannel(stream, largest_frame_bytes(), reuse=False, spin_s=SPIN_S, clock=self._clock)
        self._socket = self._opening = None
        self._pause_s, self._heard_bytes = FIRST_PAUSE_S, -1
        while self._kept and self._is_open():
            self._channel.send(self._kept.popleft())
        self._is_open()

    def _is_open(self) -> bool:
        """Whether the connection is still there; if it was lost, that is noted."""
        if self._channel is not None and self._channel.closed:
            self._lost()
        return self._channel is not None

    def _give_up_silent(self, channel: StreamChannel) -> None:
        """Makes a connection anew on which nothing has come for too long since something was sent."""
        if self._silence_s is None:
            return
        now, heard = self._clock.now(), channel.progress().received
        if heard != self._heard_bytes:
            self._heard_bytes, self._asked_at = heard, now
        elif now - self._asked_at > self._silence_s:
            self._drop()
            self._next_try = now
            self._advance()

    def _lost(self) -> None:
        """There is no connection any more; the next one is tried after a pause."""
        self._drop()
        self._next_try = self._clock.now() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _drop(self) -> None:
        for held in (self._channel, self._socket):
            if held is not None:
                held.close()
        self._channel = self._socket = self._opening = None

    # -- errors -------------------------------------------------------------------------------------------------------

    def _no_file(self, error: OSError) -> ClusterError:
        return ClusterError(f"no connection to {self._where}: {error.strerror}; see ulimit -n")

    def _explain(self, why: str) -> None:
        """Raises the error that says why we are not let in; a task that hangs up may only be ending, and is tried again."""
        if why == WRONG_SECRET:
            raise SecretError(
                f"{self._where} does not accept this task's secret: it knows another one. Give every task the same --secret-file, "
                "or check that the port is the one of that task"
            )
        if why == NO_SECRET:
            raise SecretError(
                f"{self._where} accepts only tasks that know the cluster's secret, and this task was given none. Copy the file "
                f"with the secret here and say --secret-file=FILE, or set {env.SECRET_FILE}"
            )
        if why == UNEXPECTED_SECRET:
            raise SecretError(
                f"{self._where} runs without a secret, and this task has one, so it does not talk to it. Start that task with "
                f"the same --secret-file, or this one without (is {env.SECRET_FILE} or {env.SECRET} set?)"
            )
        if why in (OTHER_VERSION, ZEROMQ):
            what = "speaks ZeroMQ, as torchquorum did before" if why == ZEROMQ else "greets as another version does:"
            raise ClusterError(
                f"{self._where} {what} protocol {PROTOCOL}, which this task speaks; install the same torchquorum on both"
            )
        if why == OTHER_PROTOCOL:
            raise ClusterError(
                f"{self._where} is not a task of torchquorum: it greets as none does; check host and port"
            )
