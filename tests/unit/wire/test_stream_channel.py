"""A worker's end of a stream: whole messages both ways over either kind, and a ps that is gone, silent or wrong is noticed."""

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest

from tests.manual_clock import ManualClock
from tests.unit.wire.streams import KINDS, WAIT_S, Host
from torchquorum.wire.channel import FOREVER_S, Pieces, Progress
from torchquorum.wire.codec import Frame
from torchquorum.wire.stream import SocketStream, StreamReader, pack
from torchquorum.wire.stream_channel import StreamChannel

LARGEST = 64 << 20


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 130_000, 1_590_000, 9_000_001])
def test_messages_of_all_sizes_arrive_whole_both_ways(host: Host, size: int) -> None:
    channel, large = host.connect(), os.urandom(size)
    peer = host.introduce(channel)
    found: list[tuple[bytes, list[bytes]] | None] = []
    reading = threading.Thread(target=lambda: found.append(host.next()))
    reading.start()
    channel.send([b"head", large, b"", b"tail"])
    assert channel.flush(WAIT_S)
    reading.join(WAIT_S)
    assert found == [(peer, [b"head", large, b"", b"tail"])]
    host.listener.send(peer, [b"answer", large])
    assert host.answer(channel) == [b"answer", large]
    channel.close()
    assert host.next(0.2) is None and host.listener.send(peer, [b"to nobody"]) is None


@pytest.mark.parametrize("wanted", [True, False])
def test_a_large_frame_goes_from_pieces_of_memory_into_pieces_that_the_receiver_chose(host: Host, wanted: bool) -> None:
    channel, large = host.connect(), os.urandom(200_000)
    memory = bytearray(len(large))

    def choose(_header: Frame, _sizes: Sequence[int]) -> Sequence[memoryview] | None:
        return [memoryview(memory)[:70_001], memoryview(memory)[70_001:]] if wanted else None

    channel.receive_into(choose)
    channel.send([b"head", Pieces([memoryview(large)[:5], memoryview(large)[5:]]), b"tail"])
    received = host.next()
    assert received is not None and received[1] == [b"head", large, b"tail"]
    host.listener.send(received[0], [b"1", large, b"tail"])
    answer = host.answer(channel)
    assert answer is not None and [answer[0], answer[2]] == [b"1", b"tail"]
    assert (bytes(memory) == large) is wanted and (answer[1] == large) is not wanted
    channel.close()


def test_several_messages_that_came_at_once_are_received_one_by_one_without_waiting(host: Host) -> None:
    channel = host.connect()
    peer = host.introduce(channel)
    assert channel.may_wait_s() == FOREVER_S
    for k in range(3):
        host.listener.send(peer, [str(k).encode()])
    assert channel.receive(WAIT_S) == [b"0"] and channel.may_wait_s() == 0.0
    assert channel.receive(0.0) == [b"1"] and channel.receive(0.0) == [b"2"]
    assert channel.may_wait_s() == FOREVER_S and channel.receive(0.0) is None
    channel.close()


@pytest.mark.parametrize("timeout_s", [0.0, 0.2])
def test_a_ps_that_is_gone_is_noticed_without_waiting_and_costs_no_busy_loop(host: Host, timeout_s: float) -> None:
    channel = host.connect()
    peer = host.introduce(channel)
    assert channel.receive(0.0) is None and not channel.closed
    host.listener.hang_up(peer)
    until_noticed = time.monotonic()
    while not channel.closed and time.monotonic() < until_noticed + WAIT_S:
        assert channel.receive(timeout_s) is None
    assert channel.closed
    channel.send([b"x" * 100_000])
    started = time.monotonic()
    assert channel.receive(0.2) is None
    assert time.monotonic() - started >= 0.04
    channel.close()


class Pair:
    """A channel whose other end is a plain socket of the test's."""

    def __init__(self) -> None:
        mine, self.peer = socket.socketpair()
        self.channel = StreamChannel(SocketStream.of(mine), LARGEST)

    def close(self) -> None:
        self.channel.close()
        self.peer.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_ps_that_reads_slowly_is_not_given_up_and_what_leaves_is_told(pair: Pair) -> None:
    """A message leaves while its channel is flushed or received from, in its own time; the one after it waits for its turn."""
    size = 8 << 20
    started = time.monotonic()
    pair.channel.send([b"head", bytes(size)])
    pair.channel.send([b"more"])
    assert not pair.channel.flush(0.05) and pair.channel.receive(0.05) is None
    assert time.monotonic() - started < WAIT_S and not pair.channel.closed
    first = pair.channel.progress()
    assert first.leaving > size // 2 and first.under_way and first.received == first.coming == 0
    reader, peer = StreamReader(LARGEST), SocketStream.of(pair.peer)
    found: list[int] = []
    moved: list[int] = []
    while len(found) < 2:
        pair.channel.flush(0.0) if len(moved) % 2 else pair.channel.receive(0.0)
        moved.append(pair.channel.progress().leaving)
        with suppress(BlockingIOError):
            found.append(sum(map(len, reader.read(peer) or [])))
    assert found == [size + 4, 4] and moved == sorted(moved, reverse=True)
    assert pair.channel.flush(0.0) and not pair.channel.progress().under_way
    peer.close()


def test_what_has_come_of_a_message_is_told_before_it_is_complete(pair: Pair) -> None:
    body = b"".join(pack([b"hello", bytes(70_000)]))
    for begin in range(0, len(body) - 1, 10_000):
        pair.peer.sendall(body[begin : min(begin + 10_000, len(body) - 1)])
        assert pair.channel.receive(0.0) is None
        progress = pair.channel.progress()
        assert progress.coming == 70_005 and progress.under_way
        assert progress.came == progress.received - 20 > begin - 20
    pair.peer.sendall(body[-1:])
    assert pair.channel.receive(WAIT_S) is not None
    assert pair.channel.progress() == Progress(received=len(body))


def test_a_ps_that_sends_what_is_no_message_is_given_up(pair: Pair) -> None:
    pair.peer.sendall(struct.pack("<I", 17))
    assert pair.channel.receive(WAIT_S) is None and pair.channel.closed


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_connection_that_was_cut_is_noticed_whatever_is_done_with_it(way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        plain = socket.create_connection(listening.getsockname())
        peer = listening.accept()[0]
    channel = StreamChannel(SocketStream.of(plain), LARGEST)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()  # with a reset, as a host that was switched off and on
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    assert poll.poll(WAIT_S * 1000)
    if way == "send":
        channel.send([b"hello"])
    else:
        assert channel.receive(WAIT_S) is None
    assert channel.closed
    channel.close()


def test_receive_gives_up_when_its_time_is_over_and_takes_up_half_a_message_later(pair: Pair) -> None:
    body = b"".join(pack([b"hello", bytes(70_000)]))
    pair.peer.sendall(body[:-1])
    started = time.monotonic()
    assert pair.channel.receive(0.05) is None and not pair.channel.closed
    assert 0.04 < time.monotonic() - started < WAIT_S
    pair.peer.sendall(body[-1:])
    message = pair.channel.receive(WAIT_S)
    assert message is not None and bytes(message[0]) == b"hello" and len(message[1]) == 70_000


def test_a_closed_channel_lets_time_pass_by_its_own_clock() -> None:
    mine, peer = socket.socketpair()
    clock = ManualClock()
    channel = StreamChannel(SocketStream.of(mine), LARGEST, clock=clock)
    peer.close()
    began = clock.now()
    assert channel.receive(10.0) is None and channel.closed
    assert clock.now() == began + 0.05
    channel.close()
