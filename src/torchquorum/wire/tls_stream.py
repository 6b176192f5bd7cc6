"""A TCP connection with TLS around its bytes, as a `ByteStream`.

Made by `opening`, on both sides; then read and written by the one thread that owns the connection. Records are made and read in memory
(`ssl.MemoryBIO`), and go to and from the system in pieces of several: fewer system calls than a socket of `ssl` makes, which reads each
record in two.

What always holds: nothing is read from or written to a peer before both certificates have been checked; what is kept for a connection
is bounded by two pieces.
"""

from __future__ import annotations

import hmac
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from torchquorum.wire.codec import Frame
from torchquorum.wire.stream import WantWrite, unacknowledged
from torchquorum.wire.tls_keys import Side

RECORD_BYTES = 16 << 10
_RECORDS = 7  # at a time: few calls, and still small enough for the allocator to use the same memory again
PIECE_BYTES = _RECORDS * RECORD_BYTES
_ROOM_BYTES = PIECE_BYTES + _RECORDS * 256


class TlsStream:
    """A connection, encrypted.

    Args:
        plain: The socket, which this stream owns from now on.
        side: Our identity, and theirs.
        server: Whether we are the side that listens.
    """

    def __init__(self, plain: socket.socket, side: Side, *, server: bool) -> None:
        self._socket, self._other, self._reader = plain, side.other, side.reader
        self.read_only = False  # whether the other side has shown that it may only read
        plain.setblocking(False)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = side.context.wrap_bio(self._in, self._out, server_side=server)
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._unsent = memoryview(b"")  # records that the system has not taken
        self._owed = (
            0  # bytes whose records are made and not all sent: they come once more, and are not encrypted again
        )
        self._ready = False

    def fileno(self) -> int:
        """Returns the socket's descriptor."""
        return self._socket.fileno()

    def begin(self) -> None:
        """Says the first words of the side that connects, and reads nothing yet.

        Raises:
            OSError: The connection is gone, or does not take them.
        """
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        self._flush()

    def put_in(self, received: bytes) -> None:
        """Takes what was read from the socket before this stream read it."""
        self._in.write(received)

    def handshake(self) -> None:
        """Goes on with the handshake, until it is done.

        Raises:
            BlockingIOError: Something has to come first; WantWrite: to leave first.
            ssl.SSLError: The other side does not know the secret, or does not speak TLS.
            OSError: The connection is gone.
        """
        while not self._ready:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._fetch()
                continue
            except ssl.SSLError:
                self._last_words()
                raise
            given = self._tls.getpeercert(binary_form=True) or b""
            self.read_only = bool(self._reader) and hmac.compare_digest(given, self._reader)
            if not self.read_only and not hmac.compare_digest(
                given, self._other
            ):  # pragma: no cover (`ssl` has checked it)
                raise ssl.SSLCertVerificationError("another certificate than the pinned one")
            self._ready = True
        self._flush()

    def recv_into(self, buffer: memoryview | bytearray, /) -> int:
        """Reads into a buffer, as much as is here if it is large; returns how many bytes, 0 at the end of the stream."""
        assert self._ready
        view, at = memoryview(buffer), 0
        while True:
            if self._in.pending or self._tls.pending():
                at = self._read_records(view, at)
            if at == len(view) or (at and len(view) - at < RECORD_BYTES):
                return at  # with little room left it was a small message, or the end of a large one
            try:
                if not self._fetch(optional=at > 0):
                    return at
            except ConnectionResetError:
                return at

    def _read_records(self, view: memoryview, at: int) -> int:
        """Reads the records that are here into a buffer from a place on; returns how far it is full."""
        read: Any = self._tls.read  # with a buffer it returns a number, which its types do not say
        left = len(view) - at
        try:
            while left and (count := read(left, view[at:])):
                at, left = at + count, left - count
        except ssl.SSLWantReadError:
            pass  # the rest of a record has not come
        return at

    def sendmsg(self, parts: Iterable[Frame], /) -> int:
        """Encrypts and sends; returns how many bytes have left, all in whole records.

        What has been encrypted and has not left counts as not sent: the caller gives it again, and its records go on from there.
        """
        assert self._ready
        skip = self._owed
        if self._unsent and not self._flush_some():
            raise BlockingIOError
        sent, self._owed = skip, 0
        for piece in _pieces(parts, skip):
            self._tls.write(piece)
            self._unsent = memoryview(self._out.read())
            if not self._flush_some():
                self._owed = len(piece)
                break
            sent += len(piece)
        if not sent:
            raise BlockingIOError
        return sent

    def pending(self) -> int:
        """Returns how many bytes have been taken from the system and not been read yet."""
        return self._tls.pending() + self._in.pending

    def unacknowledged(self) -> int:
        """Returns how many bytes have not reached the other side's system yet; of records, so a little more than were written."""
        return unacknowledged(self._socket.fileno())

    def close(self) -> None:
        """Closes it."""
        self._socket.close()

    def _fetch(self, *, optional: bool = False) -> bool:
        """Takes what the system has; False, with `optional`, if that is nothing.

        Raises:
            BlockingIOError: There is nothing.
            ConnectionResetError: The connection has ended.
        """
        try:
            count = self._socket.recv_into(self._room)
        except BlockingIOError:
            if optional:
                return False
            raise
        if not count:
            raise ConnectionResetError
        self._in.write(self._room[:count])
        return True

    def _flush(self) -> None:
        """Sends the records that are made.

        Raises:
            WantWrite: The system does not take them now.
        """
        if self._out.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._out.read())
        if not self._flush_some():
            raise WantWrite

    def _flush_some(self) -> bool:
        """Sends what the system takes; whether that was all."""
        while self._unsent:
            try:
                count = self._socket.send(self._unsent)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[count:]
        return True

    def _last_words(self) -> None:
        """Tells the other side why, if that goes at once."""
        with suppress(OSError):
            self._flush()


def _pieces(parts: Iterable[Frame], skip: int) -> Iterator[Frame]:
    """Cuts what is to be sent, behind so many bytes, into pieces of a few records; what is small is joined to a record."""
    small: list[Frame] = []
    room = RECORD_BYTES
    for part in parts:
        view = memoryview(part)
        if skip:
            skip, view = max(0, skip - len(view)), view[skip:]
        while len(view):
            if not small and len(view) >= RECORD_BYTES:
                yield view[:PIECE_BYTES]
                view = view[PIECE_BYTES:]
                continue
            small.append(view[:room])
            room, view = room - len(small[-1]), view[len(small[-1]) :]
            if not room:
                yield b"".join(small)
                small, room = [], RECORD_BYTES
    if small:
        yield b"".join(small)
