"""TLS as a stream of bytes: all arrives whole through narrow sockets, and nothing that was changed, repeated or left out on the way."""

import contextlib
import os
import random
import select
import socket
from collections.abc import Iterator

import pytest

from tests.unit.wire.streams import SECRET, until
from torchquorum.wire.codec import Frame
from torchquorum.wire.stream import StreamReader, StreamWriter
from torchquorum.wire.tls_keys import connecting_side, listening_side
from torchquorum.wire.tls_stream import PIECE_BYTES, RECORD_BYTES, TlsStream


class Pair:
    """Both ends of a connection, over sockets that hold little; with `between`, by way of the test's hands."""

    def __init__(self, *, between: bool = False) -> None:
        ours, theirs = socket.socketpair()
        self.hands: tuple[socket.socket, socket.socket] | None = None
        if between:
            mine, other = socket.socketpair()
            self.hands, theirs = (theirs, mine), other
        for plain in (ours, theirs, *(self.hands or ())):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            plain.setblocking(False)
        self.client = TlsStream(ours, connecting_side(SECRET), server=False)
        self.server = TlsStream(theirs, listening_side(SECRET), server=True)
        done: set[TlsStream] = set()

        def shake() -> bool:
            for end in (self.client, self.server):
                try:
                    end.handshake()
                    done.add(end)
                except BlockingIOError:
                    pass
                self.carry()
            return len(done) == 2

        until(shake)
        until(lambda: not self.carry())

    def carry(self) -> bytes:
        """Carries what the client has said to the server, and back; returns what the client has said."""
        if self.hands is None:
            return b""
        here, there = self.hands
        for source, target in ((there, here), (here, there)):
            said = b""
            try:
                said = source.recv(1 << 20)
                target.sendall(said)
            except BlockingIOError:
                pass
        return said

    def close(self) -> None:
        for end in (self.client, self.server, *(self.hands or ())):
            end.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def carried() -> Iterator[Pair]:
    made = Pair(between=True)
    yield made
    made.close()


SIZES = [0, 1, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, PIECE_BYTES, PIECE_BYTES + 7, 1_590_000]


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_all_sizes_arrive_whole_through_sockets_that_hold_little(pair: Pair, size: int) -> None:
    sent: list[list[Frame]] = [[b"one", os.urandom(size), b"", b"tail"], [b"two"], [os.urandom(size // 2)]]
    writer, reader = StreamWriter(pair.client), StreamReader(1 << 30, reuse=False)
    ways = [writer.put(message) for message in sent]
    found: list[list[bytes]] = []

    def move() -> bool:
        writer.flush()
        try:
            if (message := reader.read(pair.server)) is not None:
                found.append([bytes(frame) for frame in message])
        except BlockingIOError:
            pass
        return len(found) == len(sent)

    until(move)
    assert found == sent and all(way.done for way in ways) and not writer.waiting


def test_pieces_of_any_sizes_arrive_in_order_whatever_the_system_takes_at_a_time(pair: Pair) -> None:
    draw = random.Random(1)
    parts = [draw.randbytes(draw.choice([0, 1, 100, 5_000, 16_384, 70_000])) for _ in range(60)]
    whole, found, at = b"".join(parts), bytearray(), 0
    room = bytearray(50_000)
    while len(found) < len(whole):
        left = memoryview(whole)[at:]
        cut = draw.randrange(len(left) + 1)
        with contextlib.suppress(BlockingIOError):
            at += pair.client.sendmsg([left[:cut], left[cut:]]) if left else 0
        for _ in range(draw.randrange(3)):
            with contextlib.suppress(BlockingIOError):
                found += room[: pair.server.recv_into(memoryview(room)[: draw.randrange(1, len(room))])]
    assert bytes(found) == whole and at == len(whole)


def test_what_is_not_read_yet_is_pending_though_the_descriptor_does_not_show_it(pair: Pair) -> None:
    assert pair.client.sendmsg([b"x" * 1000]) == 1000
    room = bytearray(10)
    until(lambda: select.select([pair.server.fileno()], [], [], 0.1)[0])
    assert pair.server.recv_into(room) == 10 and pair.server.pending() == 990
    assert not select.select([pair.server.fileno()], [], [], 0)[0]


def test_the_end_of_the_stream_is_no_bytes(pair: Pair) -> None:
    pair.client.sendmsg([b"last words"])
    pair.client.close()
    room = bytearray(100)
    assert pair.server.recv_into(room) == 10 and pair.server.recv_into(room) == 0


def test_every_connection_has_keys_of_its_own(carried: Pair) -> None:
    """Forward secrecy: with the secret alone, what was recorded cannot be read; the same words never look the same."""
    other = Pair(between=True)
    said = []
    for each in (carried, other):
        each.client.sendmsg([b"the same words" * 100])
        said.append(each.carry())
    other.close()
    assert len(said[0]) == len(said[1]) and said[0] != said[1]
    assert b"the same words" not in said[0] + said[1]


@pytest.mark.parametrize("how", ["changed", "repeated", "left out", "of another connection"])
def test_what_is_not_as_it_was_sent_is_not_read_and_ends_the_connection(carried: Pair, how: str) -> None:
    assert carried.hands is not None
    carried.client.sendmsg([b"first"])
    first = carried.hands[0].recv(1000)
    carried.client.sendmsg([b"second"])
    second = carried.hands[0].recv(1000)
    other = Pair(between=True)
    other.client.sendmsg([b"first"])
    assert other.hands is not None
    foreign = other.hands[0].recv(1000)
    changed = first[:-1] + bytes([first[-1] ^ 1])
    sent = {"changed": changed, "repeated": first + first, "left out": second, "of another connection": foreign}[how]
    carried.hands[1].sendall(sent)
    heard = bytearray()

    def fails() -> bool:
        room = bytearray(5)
        try:
            heard.extend(room[: carried.server.recv_into(room)])
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    until(fails)
    assert bytes(heard) == (b"first" if how == "repeated" else b"")
    other.close()
