"""Both kinds of stream, for tests that hold for either: a ps task's end, and how to reach it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from torchquorum.clock import SYSTEM
from torchquorum.wire.channel import Take
from torchquorum.wire.stream_channel import StreamChannel
from torchquorum.wire.stream_listener import StreamListener
from torchquorum.wire.tcp_stream import TCP
from torchquorum.wire.transport import Listening, Transport
from torchquorum.wire.unix_stream import UNIX

WAIT_S = 30.0
KINDS = [pytest.param(UNIX, id="unix"), pytest.param(TCP, id="tcp")]


class Host:
    """A ps task's end of one kind of stream, received from by the test."""

    def __init__(self, transport: Transport, take: Take | None = None) -> None:
        self.transport = transport
        made = transport.listen(Listening(address="127.0.0.1:0", take=take))
        assert isinstance(made, StreamListener)
        self.listener = made
        self.where = made.ways[0].where

    def connect(self) -> StreamChannel:
        made = self.transport.connect("127.0.0.1", self.where, SYSTEM)
        assert isinstance(made, StreamChannel)
        return made

    def raw(self, *, token: bool = True) -> socket.socket:
        """Returns a plain connection, over which anything can be sent; with `token`, one that has been admitted."""
        if self.transport is UNIX:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.connect("\0" + self.where)
        else:
            port, _, word = self.where.partition("/")
            made = socket.create_connection(("127.0.0.1", int(port)))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.sendall(bytes.fromhex(word) if token else b"")
        made.settimeout(WAIT_S)
        return made

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


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline


def hangs_up(peer: socket.socket) -> bool:
    """Whether the other side ends a plain connection."""
    with closing(peer):
        try:
            while peer.recv(1 << 20):
                pass
        except ConnectionError:
            pass
    return True
