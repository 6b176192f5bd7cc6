"""How a TCP connection begins: a greeting of 16 bytes from each side, or TLS where there is a secret, before the first message.

`ListenerOpening` is used by a task's listener, `ChannelOpening` by the side that connects. By the first bytes each side recognises a
peer that expects something else (no secret, a secret, ZeroMQ as before protocol 6, another program), and says so in words.

    open     connects: OPEN                       listens: OPEN
    locked   connects: TLS with its certificate   listens: TLS with its own, then LOCKED inside

What always holds: nothing of a peer reaches the reader of messages before it is admitted; before that at most `SIZE` bytes of it are kept,
or what `ssl` keeps of a handshake.
"""

from __future__ import annotations

import socket
import ssl
import struct
from contextlib import suppress

from torchquorum.wire import codec
from torchquorum.wire.messages import PACKAGE, PROTOCOL, Fault
from torchquorum.wire.refusals import (
    NO_SECRET,
    OTHER_PROTOCOL,
    OTHER_VERSION,
    UNEXPECTED_SECRET,
    UNFINISHED,
    WRONG_SECRET,
    ZEROMQ,
)
from torchquorum.wire.stream import ByteStream, SocketStream
from torchquorum.wire.tls_keys import Side
from torchquorum.wire.tls_stream import TlsStream

OPEN, LOCKED = b"tquorum/2 open\r\n", b"tquorum/2 lock\r\n"
SIZE = len(OPEN)
_ANY_VERSION = b"tquorum/"
_TLS, _TLS_ALERT = b"\x16\x03", b"\x15\x03"
_ZMTP = b"\xff\0\0\0\0\0\0\0"  # the signature of ZeroMQ's greeting, as far as it is always the same (ZMTP, RFC 23)
_REASONS_OF_SECRET = ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR", "BAD_SIGNATURE")


class RefusedConnection(Exception):
    """A peer is not admitted, or does not admit us; the argument is one of the reasons in `refusals`."""

    @property
    def why(self) -> str:
        """Returns the reason."""
        return str(self.args[0])


def recognise(first: bytes) -> str | None:
    """Returns what the first bytes of a peer show: one of OPEN, LOCKED, TLS, or a reason of `refusals`; None if more are needed."""
    for said, meaning in ((OPEN, "OPEN"), (LOCKED, "LOCKED"), (_TLS, "TLS"), (_TLS_ALERT, "TLS"), (_ZMTP, ZEROMQ)):
        if first.startswith(said):
            return meaning
        if said.startswith(first):
            return None
    return OTHER_VERSION if first.startswith(_ANY_VERSION) else OTHER_PROTOCOL


class _FirstBytes:
    """Reads what a peer says first, and never more than a greeting."""

    def __init__(self, plain: socket.socket) -> None:
        self._socket, self._said, self._found = plain, b"", ""

    def __len__(self) -> int:
        return len(self._said)

    def take(self) -> bytes:
        """Returns what was said, once."""
        said, self._said = self._said, b""
        return said

    def read(self) -> str:
        """Returns what it is, see `recognise`.

        Raises:
            BlockingIOError: Not enough has come.
            RefusedConnection: The peer has hung up.
            OSError: The connection is gone.
        """
        while not self._found:
            more = self._socket.recv(SIZE - len(self._said))
            if not more:
                raise RefusedConnection(UNFINISHED)
            self._said += more
            self._found = recognise(self._said) or ""
        return self._found


class ListenerOpening:
    """The beginning of a connection, seen from the task that listens.

    Args:
        plain: The accepted socket, which does not block.
        side: Our identity where there is a secret.
        task: The name of this task, for a peer of before.
    """

    def __init__(self, plain: socket.socket, side: Side | None, task: str = "this task") -> None:
        self._socket, self._side, self._task = plain, side, task
        self._first = _FirstBytes(plain)
        self._tls: TlsStream | None = None
        self._zeromq: _WordsForZeroMQ | None = None

    def advance(self) -> ByteStream:
        """Goes on; returns the stream of an admitted peer.

        Raises:
            BlockingIOError: The peer has to say more; WantWrite: something has to leave first.
            RefusedConnection: The peer is not admitted.
            OSError: The connection is gone.
        """
        if self._tls is None:
            found = self._first.read()
            if found == ZEROMQ:
                self._tell_zeromq()
            if found == "OPEN" and self._side is None:
                self._socket.send(OPEN)
                return SocketStream.of(self._socket)
            if found != "TLS" or self._side is None:
                raise self._refuse(found)
            self._tls = TlsStream(self._socket, self._side, server=True)
            self._tls.put_in(self._first.take())
        try:
            self._tls.handshake()
        except ssl.SSLError as error:
            raise RefusedConnection(_reason(error)) from None
        except ConnectionResetError:
            raise RefusedConnection(UNFINISHED) from None
        self._tls.sendmsg([LOCKED])
        return self._tls

    def _refuse(self, found: str) -> RefusedConnection:
        """Tells the peer in its own language what this is, as far as that goes."""
        ours = OPEN if self._side is None else LOCKED
        found = {"OPEN": NO_SECRET, "LOCKED": OTHER_PROTOCOL, "TLS": UNEXPECTED_SECRET}.get(found, found)
        with suppress(OSError):
            self._socket.send(ours)
            self._hang_up()
        return RefusedConnection(found)

    def _hang_up(self) -> None:
        """Ends the connection from our side; what is not read would make the system reset it, and our words be lost."""
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.recv(1 << 16)

    def _tell_zeromq(self) -> None:
        """Tells a torchquorum of before, and refuses it."""
        with suppress(ConnectionError):
            if self._zeromq is None:
                self._zeromq = _WordsForZeroMQ(self._socket, self._task, locked=self._side is not None)
            self._zeromq.advance(len(self._first))
        with suppress(OSError):
            self._hang_up()
        raise RefusedConnection(f"{ZEROMQ} protocol {PROTOCOL}")


class ChannelOpening:
    """The beginning of a connection, seen from the side that connects.

    Args:
        plain: The connected socket, which does not block.
        side: Our identity where there is a secret.
    """

    def __init__(self, plain: socket.socket, side: Side | None) -> None:
        self._socket, self._side = plain, side
        self._first = _FirstBytes(plain)
        self._tls: TlsStream | None = None
        self._greeting = b""
        if side is None:
            plain.send(OPEN)
        else:
            self._tls = TlsStream(plain, side, server=False)
            self._tls.begin()

    def advance(self) -> ByteStream:
        """Goes on; returns the stream once the other side has admitted us.

        Raises:
            BlockingIOError: The other side has to say more; WantWrite: something has to leave first.
            RefusedConnection: The other side does not admit us, or is not what we look for.
            OSError: The connection is gone.
        """
        found = self._first.read()
        if self._tls is None:
            if found != "OPEN":
                raise RefusedConnection(NO_SECRET if found in ("LOCKED", "TLS") else found)
            return SocketStream.of(self._socket)
        if found != "TLS":
            raise RefusedConnection(UNEXPECTED_SECRET if found in ("OPEN", "LOCKED") else found)
        self._tls.put_in(self._first.take())
        try:
            self._tls.handshake()
            while len(self._greeting) < SIZE:
                part = bytearray(SIZE - len(self._greeting))
                count = self._tls.recv_into(part)
                if not count:
                    raise ConnectionResetError
                self._greeting += part[:count]
        except ssl.SSLError as error:
            raise RefusedConnection(_reason(error)) from None
        if self._greeting != LOCKED:
            raise RefusedConnection(OTHER_VERSION)
        return self._tls


def _reason(error: ssl.SSLError) -> str:
    reason = error.reason or ""
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return NO_SECRET
    return WRONG_SECRET if any(word in reason for word in _REASONS_OF_SECRET) else OTHER_PROTOCOL


class _WordsForZeroMQ:
    """What a torchquorum that speaks ZeroMQ understands (ZMTP 3.0, RFC 23): a Fault, if neither side has a secret.

    One that has a secret takes no message from us: it is told that its handshake fails, and knows why, or that this is no task of its kind.
    """

    _GREETING_BYTES = 64

    def __init__(self, plain: socket.socket, task: str, *, locked: bool) -> None:
        self._socket, self._task, self._heard = plain, task, 0
        mechanism = b"CURVE" if locked else b"NULL"
        greeting = _ZMTP + b"\1\x7f\3\0" + mechanism.ljust(20, b"\0") + bytes([locked]) + bytes(31)
        ready = b"\5READY\x0bSocket-Type\0\0\0\6ROUTER\x08Identity\0\0\0\0"
        command = b"\3BAD" if locked else ready
        plain.send(greeting + bytes([4, len(command)]) + command)

    def advance(self, already: int) -> None:
        """Returns when the peer has been told, or has gone; `already` bytes of its greeting have been read.

        Raises:
            BlockingIOError: It has not greeted to the end yet.
        """
        while already + self._heard <= self._GREETING_BYTES:
            count = len(self._socket.recv(4096))
            if not count:
                return
            self._heard += count
        text = (
            f"{self._task} speaks protocol {PROTOCOL} (torchquorum {PACKAGE}), over TCP streams, and this task an older one, "
            "over ZeroMQ; install the same torchquorum on both"
        )
        body = codec.encode(Fault("protocol", text))
        self._socket.send(b"\2" + struct.pack(">Q", len(body)) + body)
