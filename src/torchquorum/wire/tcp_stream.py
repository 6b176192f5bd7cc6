"""TCP: where every task listens at its address, how it is reached there, and what a TCP socket needs.

Used by `transports` for the entry to a task, and by `entry_channel`. With a secret TLS is around the bytes (`tls_stream`), and only
who knows it is admitted; without one everybody is who greets as a task does (`opening`).
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from torchquorum.errors import AddressInUseError, ClusterError
from torchquorum.wire.address import bind_place, explain_in_use, largest_frame_bytes, require_secret
from torchquorum.wire.opening import ListenerOpening
from torchquorum.wire.stream import LARGE_BYTES
from torchquorum.wire.stream_listener import Opening, StreamListener, StreamOptions
from torchquorum.wire.tls_keys import listening_side
from torchquorum.wire.transport import Listening

KIND = "tcp"
BUFFER_BYTES = 4 << 20
SPIN_S = 0.004
BACKLOG = 512
BIND_S = 2.0
LISTENER_FILES = 8
THREADED_BYTES = range(LARGE_BYTES, 8 << 20)  # beyond, arithmetic by all cores is worth more than copies side by side


def listen(listening: Listening) -> StreamListener:
    """Returns the listener at a task's address.

    Raises:
        SecretError: The address is not loopback and there is no secret.
        ClusterError: Nobody can listen there, or no file descriptor is left for it.
    """
    where = bind_place(listening.address)
    require_secret(listening.address, where[0], listening.listen_fd, listening.access)
    secret = listening.access.secret
    side = listening_side(secret, readers=listening.readers) if secret is not None else None

    def opening(accepted: socket.socket) -> Opening:
        prepare(accepted)
        return ListenerOpening(accepted, side, f"the task at {listening.address}")

    options = StreamOptions(
        kind=KIND,
        opening=opening,
        largest_bytes=listening.largest_bytes or largest_frame_bytes(),
        threaded=THREADED_BYTES,
        take=listening.take,
        reuse=listening.reuse,
        say=listening.say,
    )
    try:
        made = _socket_for(where, listening)
    except OSError as error:
        raise ClusterError(_no_file(listening, error)) from None
    try:
        widen(made)
        made.listen(BACKLOG)
        return StreamListener(made, options, listening.clock)
    except OSError as error:
        made.close()
        raise ClusterError(_no_file(listening, error)) from None


def _no_file(listening: Listening, error: OSError) -> str:
    return f"cannot listen on {listening.address}: {error.strerror}; see ulimit -n"


def _socket_for(where: tuple[str, int], listening: Listening) -> socket.socket:
    """Returns the launcher's socket, or one that is bound; a port that its last owner has only just given up gets a moment."""
    if listening.listen_fd is not None:
        return socket.socket(fileno=listening.listen_fd)
    address, clock = listening.address, listening.clock
    made = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET, socket.SOCK_STREAM)
    deadline = clock.now() + BIND_S
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:
                made.bind(where)
                return made
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    why = error.strerror or str(error)
                    raise ClusterError(f"cannot listen on {address}: {why}; is that an address of this host?") from None
                if clock.now() >= deadline:
                    raise AddressInUseError(explain_in_use(address)) from None
            clock.sleep(0.1)
    except BaseException:
        made.close()
        raise


def prepare(connection: socket.socket) -> None:
    """Has small messages sent at once, and a host that is gone noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def widen(connection: socket.socket) -> None:
    """Gives a socket room for a whole message, where the system allows that much; elsewhere it adapts by itself."""
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        try:
            most = int(Path(f"/proc/sys/net/core/{limit}").read_text())
        except (OSError, ValueError):
            continue
        if most >= BUFFER_BYTES // 2:
            connection.setsockopt(socket.SOL_SOCKET, option, min(most, BUFFER_BYTES))
