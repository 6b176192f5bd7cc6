"""The transport for tasks of one host: a stream over a Unix socket.

The socket is in the abstract namespace: it has no file and is gone with its process. Only processes of the same user, or root, are
admitted; the kernel tells who connects.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

from torchquorum.clock import Clock
from torchquorum.errors import ClusterError
from torchquorum.wire.address import largest_frame_bytes
from torchquorum.wire.messages import Way
from torchquorum.wire.opening import RefusedConnection
from torchquorum.wire.refusals import OTHER_USER
from torchquorum.wire.stream import SocketStream
from torchquorum.wire.stream_channel import StreamChannel
from torchquorum.wire.stream_listener import StreamListener, StreamOptions
from torchquorum.wire.transport import Listening, Transport

KIND = "unix"
CONNECT_S = 5.0
SPIN_S = 0.001
_CREDENTIALS = struct.Struct("3i")


def listen(listening: Listening) -> StreamListener:
    """Returns the listener for tasks of this host.

    Raises:
        ClusterError: No file descriptor is left for it.
    """
    name = f"torchquorum/{secrets.token_hex(16)}"
    options = StreamOptions(
        kind=KIND,
        ways=[Way(KIND, name)],
        opening=OwnUser,
        largest_bytes=largest_frame_bytes(),
        say=listening.say,
    )
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.bind("\0" + name)
            made.listen(128)
            return StreamListener(made, options, listening.clock)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise ClusterError(f"no Unix socket for the tasks of this host: {error.strerror}; see ulimit -n") from None


class OwnUser:
    """Admits who is of the same user, or root."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted

    def advance(self) -> SocketStream:
        """Returns the stream of an admitted peer.

        Raises:
            RefusedConnection: It is another user.
        """
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] not in (os.getuid(), 0):
            raise RefusedConnection(OTHER_USER)
        return SocketStream.of(self._socket)


def connect(_host: str, where: str, clock: Clock) -> StreamChannel:
    """Connects to a ps task of this host.

    Raises:
        OSError: It cannot be reached.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(CONNECT_S)
        made.connect("\0" + where)
    except BaseException:
        made.close()
        raise
    return StreamChannel(SocketStream.of(made), largest_frame_bytes(), spin_s=SPIN_S, clock=clock)


UNIX = Transport(kind=KIND, same_host=True, listen=listen, connect=connect)
