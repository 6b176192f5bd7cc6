"""ZeroMQ over TCP: a DEALER on the side that connects, a ROUTER on the side that listens.

ZeroMQ reconnects by itself; what was in flight then is lost, which the protocol expects. Large frames are not copied on
their way out: `send` returns a handle that says when they have left.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from typing import Any

import zmq

from torchquorum.errors import AddressInUseError, ClusterError
from torchquorum.transport.channel import Channel, Peer, Sent
from torchquorum.transport.codec import Frame

COPY_BELOW_BYTES = 64 << 10
LINGER_MS = 2000
MAX_FRAME_BYTES = 16 << 30


def _context() -> zmq.Context[Any]:
    return zmq.Context.instance()


def endpoint(address: str) -> str:
    """Returns the ZeroMQ endpoint of `host:port`, resolved, so that a name which does not exist is an error here."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ClusterError(
            f"host {host!r} in {address!r} cannot be found ({error}); check its spelling and your DNS"
        ) from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, _, _, _, where = found[0]
    return f"tcp://[{where[0]}]:{port}" if family == socket.AF_INET6 else f"tcp://{where[0]}:{port}"


class ZmqChannel:
    """A connection to one ps task."""

    def __init__(self, address: str, identity: bytes) -> None:
        self.socket = _context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        where = endpoint(address)
        if where.startswith("tcp://["):
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(where)

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends a message; large frames must stay as they are until the answer has come."""
        self.socket.send_multipart(frames, copy=all(len(f) < COPY_BELOW_BYTES for f in frames))

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time."""
        if not self.socket.poll(max(0, int(timeout_s * 1000))):
            return None
        return [f.buffer for f in self.socket.recv_multipart(copy=False)]

    def close(self) -> None:
        """Closes this end; what was sent is still delivered, for a moment."""
        self.socket.close()


class ZmqListener:
    """The socket a ps task listens on.

    Args:
        address: host:port of this task in the cluster; loopback names bind to loopback, all others to every interface.
        listen_fd: A listening socket that the launcher made and passed on, so that nobody else can take the port.
        max_frame_bytes: Whoever sends a larger frame is cut off.
    """

    def __init__(self, address: str, listen_fd: int | None = None, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.socket = _context().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        host, _, port = address.rpartition(":")
        where = _bind_to(host, port)
        if where.startswith("tcp://["):
            self.socket.setsockopt(zmq.IPV6, 1)
        if listen_fd is not None:
            self.socket.setsockopt(zmq.USE_FD, listen_fd)
        self._bind(where, address)

    def _bind(self, where: str, address: str) -> None:
        """Binds; a port that its last owner has only just given up gets a moment."""
        deadline = time.monotonic() + 2.0
        while True:
            try:
                self.socket.bind(where)
                return
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                self.socket.close(0)
                if error.errno == errno.EADDRINUSE:
                    raise AddressInUseError(_in_use(address)) from None
                raise ClusterError(
                    f"cannot listen on {address}: {error.strerror}; is that an address of this host?"
                ) from None

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if timeout_s <= 0 or not self.socket.poll(int(timeout_s * 1000)):
                return None
            frames = self.socket.recv_multipart(copy=False)
        return bytes(frames[0].buffer), [f.buffer for f in frames[1:]]

    def wait(self, others: Sequence[Channel], timeout_s: float) -> None:
        """Returns when something has come here or on one of the other channels, or when the time is up."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        for other in others:
            if isinstance(other, ZmqChannel):
                poller.register(other.socket, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message; a peer that is gone is no error."""
        if all(len(f) < COPY_BELOW_BYTES for f in frames):
            self.socket.send_multipart([peer, *frames])
            return None
        return self.socket.send_multipart([peer, *frames], copy=False, track=True)

    def close(self) -> None:
        """Stops listening; what was sent is still delivered, for a moment."""
        self.socket.close()


def _bind_to(host: str, port: str) -> str:
    if host in ("localhost", "127.0.0.1"):
        return f"tcp://127.0.0.1:{port}"
    if host in ("[::1]", "::1"):
        return f"tcp://[::1]:{port}"
    return f"tcp://*:{port}"


def _in_use(address: str) -> str:
    port = int(address.rpartition(":")[2])
    holder = holder_of_port(port)
    who = f"held by {holder}" if holder else "held by a process that this user may not look at"
    return (
        f"cannot listen on {address}: the port is in use, {who}. "
        f"End that process, or give this task another port in --ps_hosts or --worker_hosts (on every task)."
    )


def holder_of_port(port: int) -> str | None:
    """Returns 'process 123 (name)' of whoever listens on a TCP port of this host, where that can be told."""
    from torchquorum.transport.procnet import listening_process

    return listening_process(port)
