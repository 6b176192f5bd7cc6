"""The transport for tasks of other hosts: a stream over TCP, beside ZeroMQ's.

ZeroMQ passes every message through a thread and memory of its own; for a megabyte that costs more than the network inside one host.
This stream is offered only where the cluster has no secret, as it does not encrypt. Its port is any free one; Welcome names it together
with a token that a connection must send first.
"""

from __future__ import annotations

import secrets
import socket
import sys
from pathlib import Path

from torchquorum.clock import Clock
from torchquorum.wire.address import bind_host, largest_frame_bytes
from torchquorum.wire.messages import Way
from torchquorum.wire.stream import LARGE_BYTES, SocketStream
from torchquorum.wire.stream_channel import StreamChannel
from torchquorum.wire.stream_listener import StreamListener, StreamOptions
from torchquorum.wire.transport import Listening, Transport

KIND = "tcp"
TOKEN_BYTES = 32
CONNECT_S = 2.0
BUFFER_BYTES = 4 << 20
SPIN_S = 0.004
THREADED_BYTES = range(LARGE_BYTES, 8 << 20)  # beyond, arithmetic by all cores is worth more than copies side by side


def listen(listening: Listening) -> StreamListener | None:
    """Returns the listener for tasks of other hosts; None with a secret, or where no port can be had."""
    if listening.access.secret is not None or sys.platform != "linux":
        return None
    try:
        return listen_on(bind_host(listening.address), listening)
    except OSError:
        return None  # then all use ZeroMQ


def listen_on(host: str, listening: Listening) -> StreamListener:
    """Returns a listener on any free port of an address of this host.

    Raises:
        OSError: No port can be had there.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        _widen(made)
        made.bind((host, 0))
        made.listen(128)
        token = secrets.token_bytes(TOKEN_BYTES)
        options = StreamOptions(
            way=Way(KIND, f"{made.getsockname()[1]}/{token.hex()}"),
            admit=_prepare,
            token=token,
            refused="a TCP stream without its token",
            largest_bytes=largest_frame_bytes(),
            threaded=THREADED_BYTES,
            take=listening.take,
        )
        return StreamListener(made, options, listening.clock)
    except BaseException:
        made.close()
        raise


def connect(host: str, where: str, clock: Clock) -> StreamChannel:
    """Connects to a ps task on another host.

    Raises:
        OSError: It cannot be reached.
        ValueError: The way makes no sense.
    """
    port, _, token = where.partition("/")
    made = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
    try:
        _prepare(made)
        _widen(made)
        made.sendall(bytes.fromhex(token))
    except BaseException:
        made.close()
        raise
    return StreamChannel(SocketStream.of(made), largest_frame_bytes(), spin_s=SPIN_S, clock=clock)


def _prepare(connection: socket.socket) -> bool:
    """Has small messages sent at once, and a host that is gone noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return True


def _widen(connection: socket.socket) -> None:
    """Gives a socket room for a whole message, where the system allows that much; elsewhere it adapts by itself."""
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        try:
            most = int(Path(f"/proc/sys/net/core/{limit}").read_text())
        except (OSError, ValueError):
            continue
        if most >= BUFFER_BYTES // 2:
            connection.setsockopt(socket.SOL_SOCKET, option, min(most, BUFFER_BYTES))


TCP = Transport(kind=KIND, same_host=False, listen=listen, connect=connect)
