"""All kinds of stream, for tests that hold for each: a task's end, and how to reach it."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import closing
from typing import Protocol, Self

from tests.ports import free_port
from torchquorum.clock import SYSTEM
from torchquorum.cluster.secret import OPEN, Access, Secret
from torchquorum.wire import tcp_stream
from torchquorum.wire.channel import Take
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.opening import OPEN as GREETING
from torchquorum.wire.stream_channel import StreamChannel
from torchquorum.wire.stream_listener import StreamListener
from torchquorum.wire.tls_keys import connecting_side
from torchquorum.wire.tls_stream import TlsStream
from torchquorum.wire.transport import Listening
from torchquorum.wire.unix_stream import UNIX

WAIT_S = 30.0
KINDS = ["unix", "tcp", "tls"]
SECRET = Secret("the-secret-of-this-cluster-0123456789abcdef")
LOCKED = Access(secret=SECRET)


class Raw(Protocol):
    """A plain connection, over which anything can be sent."""

    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...


class RawTls:
    """A connection of somebody who knows the secret, and sends what he likes."""

    def __init__(self, stream: TlsStream) -> None:
        self._stream, self._poll = stream, select.poll()
        self._poll.register(stream.fileno(), select.POLLIN)

    def sendall(self, data: bytes, /) -> None:
        assert self._stream.sendmsg([data]) == len(data)

    def recv(self, size: int, /) -> bytes:
        room = bytearray(size)
        while True:
            try:
                return bytes(room[: self._stream.recv_into(room)])
            except BlockingIOError:
                assert self._poll.poll(WAIT_S * 1000)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


class Host:
    """A task's end of one kind of stream, received from by the test."""

    def __init__(self, kind: str, take: Take | None = None) -> None:
        self.kind, self.access = kind, LOCKED if kind == "tls" else OPEN
        self.address = f"127.0.0.1:{free_port()}"
        listen = UNIX.listen if kind == "unix" else tcp_stream.listen
        made = listen(Listening(address=self.address, access=self.access, take=take))
        assert isinstance(made, StreamListener)
        self.listener = made
        self.where = made.ways[0].where if made.ways else ""

    def connect(self) -> StreamChannel:
        if self.kind == "unix":
            made = UNIX.connect("127.0.0.1", self.where, SYSTEM)
            assert isinstance(made, StreamChannel)
            return made
        return settle(EntryChannel(self.address, self.access), self.pump)

    def pump(self) -> None:
        assert self.listener.receive(0.0) is None

    def dial(self) -> socket.socket:
        """Returns a plain connection on which nothing has been said."""
        if self.kind == "unix":
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.connect("\0" + self.where)
        else:
            host, _, port = self.address.rpartition(":")
            made = socket.create_connection((host, int(port)))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.settimeout(WAIT_S)
        return made

    def raw(self) -> Raw:
        """Returns a connection that has been admitted, over which anything can be sent."""
        made = self.dial()
        if self.kind == "tcp":
            made.sendall(GREETING)
            until(lambda: self.pump() or greeted(made))
        if self.kind != "tls":
            return made
        tls = TlsStream(made, connecting_side(SECRET), server=False)

        def is_open() -> bool:
            self.pump()
            try:
                tls.handshake()
                return tls.recv_into(bytearray(16)) == 16
            except BlockingIOError:
                return False

        until(is_open)
        return RawTls(tls)

    def peer(self, number: int) -> bytes:
        return self.listener.prefix + str(number).encode()

    def next(self, timeout_s: float = WAIT_S) -> tuple[bytes, list[bytes]] | None:
        """Returns the next message, copied."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if (message := self.listener.receive(left_s)) is not None:
                return message[0], [bytes(f) for f in message[1]]
        return None

    def answer(self, channel: StreamChannel) -> list[bytes] | None:
        """Returns what a channel receives while the ps does its part."""
        found: list[list[bytes]] = []

        def come() -> bool:
            assert self.listener.receive(0.0) is None
            if (message := channel.receive(0.01)) is not None:
                found.append([bytes(f) for f in message])
            return bool(found) or channel.closed

        until(come)
        return found[0] if found else None

    def introduce(self, channel: StreamChannel) -> bytes:
        """Returns the name under which a channel is known here."""
        channel.send([b"hello"])
        received = self.next()
        assert received is not None and received[1] == [b"hello"]
        return received[0]

    def close(self) -> None:
        self.listener.close()


def settle(channel: EntryChannel, pump: Callable[[], object] = lambda: None) -> StreamChannel:
    """Returns the connection of a channel, once it is made."""

    def is_connected() -> bool:
        pump()
        assert channel.receive(0.001) is None
        return channel.is_connected

    until(is_connected)
    made = channel.settled()
    assert isinstance(made, StreamChannel)
    return made


def greeted(plain: socket.socket) -> bool:
    """Whether the other side's greeting has come, which is taken."""
    plain.setblocking(False)
    try:
        return plain.recv(16) == GREETING
    except BlockingIOError:
        return False
    finally:
        plain.settimeout(WAIT_S)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline


def hangs_up(peer: Raw) -> bool:
    """Whether the other side ends a plain connection."""
    with closing(peer):
        try:
            while peer.recv(1 << 20):
                pass
        except ConnectionError:
            pass
    return True
