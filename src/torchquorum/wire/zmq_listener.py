"""ZeroMQ over TCP, the side that listens: a ROUTER. It is the entry to every task, with the cluster's access control.

Part of a task's listener; used by the thread that receives. What always holds: what one peer can make a task keep is bounded, whether it
sends or does not read; no error of ZeroMQ leaves this package.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.errors import AddressInUseError, ClusterError
from torchquorum.wire.address import bind_endpoint, explain_in_use, largest_frame_bytes, require_secret
from torchquorum.wire.channel import FOREVER_S, Later, Peer, Pollable, Sent, wait_for_any
from torchquorum.wire.codec import Frame
from torchquorum.wire.descriptors import check_files
from torchquorum.wire.messages import Way
from torchquorum.wire.zmq_access import HANDSHAKE_MS, AccessMonitor
from torchquorum.wire.zmq_channel import COPY_BELOW_BYTES, LINGER_MS, context
from torchquorum.wire.zmq_events import unwatch
from torchquorum.wire.zmq_keys import lock_listener

# What one peer can make us keep: messages that it sent and we have not looked at, answers that it does not read.
TAKE_AHEAD = 64
SEND_AHEAD = 1000
LARGE_AHEAD = 2
# That a large answer was taken is told by a thread, which may be late: so the next one is put off for a while before it is lost.
PUT_OFF_S, LOOK_EVERY_S = 1.0, 0.005
BIND_S = 2.0
BACKLOG = 512
LISTENER_FILES = 16
MOST_UNWANTED = 1000


class ZmqListener:
    """The socket a task listens on.

    Args:
        address: host:port of this task in the cluster; loopback names bind to loopback, all others to every interface.
        listen_fd: A listening socket that the launcher made and passed on, so that no other process can take the port.
        max_frame_bytes: A peer that sends a larger frame loses its connection.
        access: Who may connect.
        say: Prints a line for people about connections that were refused.
        clock: Tells the time.

    Raises:
        SecretError: The address is not loopback and there is no secret.
        ClusterError: Nobody can listen there, or no file descriptor is left for it.
    """

    prefix = b""

    def __init__(
        self,
        address: str,
        listen_fd: int | None = None,
        *,
        max_frame_bytes: int | None = None,
        access: Access = OPEN,
        say: Callable[[str], None] = lambda _: None,
        clock: Clock = SYSTEM,
    ) -> None:
        where = bind_endpoint(address)
        require_secret(address, where, listen_fd, access)
        self._clock = clock
        # A context of its own: ZeroMQ asks one handler per context which keys are allowed.
        self._context: zmq.Context[Any] | None = None
        self._access: AccessMonitor | None = None
        try:
            check_files(LISTENER_FILES)
            self._context = zmq.Context() if access.secret is not None else None
            self.socket = (self._context or context()).socket(zmq.ROUTER)
        except (OSError, zmq.ZMQError) as error:
            raise _no_file(address, error) from None
        self._set_options(largest_frame_bytes() if max_frame_bytes is None else max_frame_bytes)
        self.unwanted: set[Peer] = set()
        self._large: dict[Peer, deque[Sent]] = {}
        self._put_off: dict[Peer, tuple[Sequence[Frame], Later, float]] = {}
        self._next_look = 0.0
        self._unsure = True  # whether messages may be here of which the descriptor has nothing to show any more
        if where.startswith("tcp://["):
            self.socket.setsockopt(zmq.IPV6, 1)
        if listen_fd is not None:
            self.socket.setsockopt(zmq.USE_FD, listen_fd)
        try:
            allowed = lock_listener(self.socket, access.secret) if access.secret is not None else None
            self._access = AccessMonitor(self.socket, allowed, say, clock=clock)
            self._bind(where, address)
            self._fd = int(self.socket.getsockopt(zmq.FD))
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise _no_file(address, error) from None
        except BaseException:
            self.close()
            raise

    def _set_options(self, max_frame_bytes: int) -> None:
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, SEND_AHEAD)
        self.socket.setsockopt(zmq.RCVHWM, TAKE_AHEAD)
        self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Without a domain ZeroMQ takes any bytes for a message of a peer of 2010; with one it wants a modern greeting.
        self.socket.setsockopt(zmq.ZAP_DOMAIN, b"torchquorum")
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)

    @property
    def ways(self) -> list[Way]:
        """Returns nothing: the entry is known to every task."""
        return []

    @property
    def turned_away(self) -> dict[str, int]:
        """Returns how many connections were refused, by reason."""
        return self._access.counts() if self._access is not None else {}

    def _bind(self, where: str, address: str) -> None:
        """Binds; a port that its last owner has only just given up gets a moment."""
        deadline = self._clock.now() + BIND_S
        while True:
            try:
                self.socket.bind(where)
                return
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE and self._clock.now() < deadline:
                    self._clock.sleep(0.1)
                    continue
                if error.errno == errno.EADDRINUSE:
                    raise AddressInUseError(explain_in_use(address)) from None
                raise ClusterError(
                    f"cannot listen on {address}: {error.strerror}; is that an address of this host?"
                ) from None

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        self._send_put_off()
        self._unsure = True
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            most_s = min(timeout_s, LOOK_EVERY_S) if self._put_off else timeout_s
            if timeout_s <= 0 or not self.socket.poll(int(most_s * 1000)):
                return None
            frames = self.socket.recv_multipart(copy=False)
        peer = bytes(frames[0].buffer)
        if peer in self.unwanted and self._access is not None:
            self.unwanted.discard(peer)
            self._access.hang_up(frames[-1].get(zmq.SRCFD))
        return peer, [f.buffer for f in frames[1:]]

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that sends too much, with its next message; it may connect again."""
        self.unwanted.add(peer)
        if len(self.unwanted) > MOST_UNWANTED:
            self.unwanted.pop()

    def any_thread(self, peer: Peer) -> bool:
        """Returns False: a ZeroMQ socket belongs to one thread."""
        return False

    def fileno(self) -> int:
        """Returns ZeroMQ's descriptor, which shows only changes: ask `may_wait_s` before it is waited for."""
        return self._fd

    def may_wait_s(self) -> float:
        """Returns 0.0 if a message is here, which the descriptor need not show; little while an answer is put off."""
        if self._unsure:
            self._unsure = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
            if self._unsure:
                return 0.0
        return LOOK_EVERY_S if self._put_off else FOREVER_S

    def wait(self, others: Sequence[Pollable], timeout_s: float) -> None:
        """Returns when something has come here or on one of the other channels, or when the time is up."""
        wait_for_any([self, *others], timeout_s, self._clock)

    def wake(self) -> None:
        """Does nothing: no other thread has anything to do here. Joined with other transports, see `torchquorum.wire.joined`."""

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message; a peer that is gone is no error, and one that does not read loses what does not fit."""
        self._unsure = True
        try:
            return self._send(peer, frames)
        except zmq.ZMQError:
            return None  # the peer is gone

    def _send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        if all(len(f) < COPY_BELOW_BYTES for f in frames):
            self.socket.send_multipart([peer, *frames])
            return None
        if len(self._under_way(peer)) < LARGE_AHEAD:
            return self._send_large(peer, frames)
        if peer in self._put_off:
            return None  # it has not taken what it asked for before; it will ask again
        later = Later()
        self._put_off[peer] = frames, later, self._clock.now() + PUT_OFF_S
        return later

    def _send_large(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        sent = self.socket.send_multipart([peer, *frames], copy=False, track=True)
        if sent is not None:
            self._under_way(peer).append(sent)
        return sent

    def _send_put_off(self) -> None:
        """Sends what was put off to those who have taken something since; who takes nothing for a while loses it."""
        if not self._put_off or (now := self._clock.now()) < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        for peer, (frames, later, until) in [*self._put_off.items()]:
            taken = len(self._under_way(peer)) < LARGE_AHEAD
            if taken or now >= until:
                del self._put_off[peer]
                sent: Sent | None = None
                with suppress(zmq.ZMQError):  # the peer is gone
                    sent = self._send_large(peer, frames) if taken else None
                later.given_over(sent)

    def _under_way(self, peer: Peer) -> deque[Sent]:
        """Returns the large messages that a peer has not taken yet."""
        under_way = self._large.get(peer)
        if under_way is None:
            self._large = {p: sent for p, sent in self._large.items() if not all(s.done for s in sent)}
            under_way = self._large[peer] = deque()
        while under_way and under_way[0].done:
            under_way.popleft()
        return under_way

    def close(self) -> None:
        """Stops listening; what was sent is still delivered, for a moment."""
        for peer, (frames, _, _) in self._put_off.items():
            with suppress(zmq.ZMQError):
                self._send_large(peer, frames)
        self._put_off.clear()
        if self._access is not None:
            unwatch(self.socket)
        self.socket.close()
        if self._access is not None:
            self._access.close()
            self._access = None
        if self._context is not None:
            self._context.term()
            self._context = None


def _no_file(address: str, error: OSError | zmq.ZMQError) -> ClusterError:
    return ClusterError(f"cannot listen on {address}: {error.strerror}; see ulimit -n")
