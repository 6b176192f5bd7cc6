"""A ps task's end of its streams: who is admitted, who is served, and what slow, silent or wrong peers cost."""

import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from tests.manual_clock import ManualClock
from tests.unit.wire.no_files import no_file_left
from tests.unit.wire.streams import KINDS, WAIT_S, Host, hangs_up, until
from torchquorum.wire.address import largest_frame_bytes
from torchquorum.wire.channel import FOREVER_S
from torchquorum.wire.messages import Way
from torchquorum.wire.stream import pack
from torchquorum.wire.stream_listener import (
    LARGE_AHEAD,
    MOST_UNKNOWN,
    UNKNOWN_S,
    StreamListener,
    StreamOptions,
)
from torchquorum.wire.tcp_stream import TCP


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


@pytest.fixture
def tcp() -> Iterator[Host]:
    made = Host(TCP)
    yield made
    made.close()


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 17),
        struct.pack("<IQ", 1, 1 << 60),
        struct.pack("<IQQ", 2, 5, largest_frame_bytes() + 1),
        struct.pack("<IQ", 1, (16 << 20) + 1),
    ],
)
def test_what_is_no_message_ends_the_connection_and_holds_up_nobody(host: Host, said: bytes) -> None:
    with host.raw() as peer:
        peer.sendall(said)
        assert host.next(0.3) is None
        assert hangs_up(peer)
    channel = host.connect()
    assert host.introduce(channel) == host.peer(2)
    channel.close()


def test_several_messages_that_came_at_once_are_received_one_by_one_without_waiting(host: Host) -> None:
    with host.raw() as peer:
        peer.sendall(b"".join(b"".join(pack([b"%d" % k])) for k in range(3)))
        until(lambda: host.listener.may_wait_s() == 0.0 or host.next(0.05) == (host.peer(1), [b"0"]))
        assert host.next() == (host.peer(1), [b"1"]) and host.next() == (host.peer(1), [b"2"])
        assert host.listener.receive(0.0) is None and host.listener.may_wait_s() == FOREVER_S


def test_an_answer_to_a_peer_that_left_does_not_reach_the_next_one(host: Host) -> None:
    first = host.connect()
    gone = host.introduce(first)
    first.close()
    assert host.next(0.1) is None
    second = host.connect()
    peer = host.introduce(second)
    assert peer != gone
    assert host.listener.send(gone, [b"late"]) is None
    host.listener.hang_up(gone)
    host.listener.send(peer, [b"mine"])
    assert host.answer(second) == [b"mine"]
    second.close()


@pytest.mark.parametrize(("size", "kept"), [(20 << 20, LARGE_AHEAD), (60_000, None)])
def test_a_peer_that_does_not_read_loses_answers_and_holds_up_nobody(host: Host, size: int, kept: int | None) -> None:
    channel, other = host.connect(), host.connect()
    peer = host.introduce(channel)
    started = time.monotonic()
    ways = [host.listener.send(peer, [b"h", bytes(size)]) for _ in range(10 if kept else 3000)]
    assert time.monotonic() - started < WAIT_S
    waiting = sum(way is not None for way in ways)
    assert waiting == kept if kept else 0 < waiting < 3000
    host.introduce(other)
    channel.close()
    assert host.next(0.3) is None
    assert all(way is None or way.done for way in ways)
    other.close()


def test_an_answer_to_a_peer_that_was_cut_off_is_lost_and_no_error(tcp: Host) -> None:
    with tcp.raw() as peer:
        peer.sendall(b"".join(pack([b"hello"])))
        received = tcp.next()
        assert received is not None
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: tcp.listener.send(received[0], [b"late"]) is None and tcp.listener.receive(0.01) is None)
    assert tcp.listener.send(received[0], [b"later still"]) is None


def test_no_descriptor_left_costs_the_new_connection_and_no_other(host: Host) -> None:
    channel = host.connect()
    peer = host.introduce(channel)
    late = host.connect()
    with no_file_left():
        assert host.listener.receive(0.0) is None
        assert late.receive(WAIT_S) is None and late.closed  # refused at once: its owner uses another transport
        channel.send([b"still here"])
        assert host.next() == (peer, [b"still here"])
    again = host.connect()
    assert host.introduce(again) == host.peer(2)
    for each in (channel, late, again):
        each.close()


def test_a_closed_listener_leaves_no_descriptor_and_no_connection(host: Host) -> None:
    channel = host.connect()
    host.introduce(channel)
    before = len(os.listdir("/proc/self/fd"))
    host.listener.close()
    assert len(os.listdir("/proc/self/fd")) == before - 4  # the socket, its reserve, the poll, the connection
    assert channel.receive(WAIT_S) is None and channel.closed
    channel.close()
    with pytest.raises(OSError, match="refused"):
        host.connect()
    host.listener = Host(host.transport).listener  # for the fixture to close


# -- before a connection is admitted --------------------------------------------------------------------------------------


def test_a_connection_without_the_token_is_closed_and_counted(tcp: Host) -> None:
    with tcp.raw(token=False) as unknown:
        unknown.sendall(os.urandom(32) + b"".join(pack([b"hello"])))
        assert tcp.next(0.3) is None
        assert hangs_up(unknown)
    assert tcp.listener.turned_away == {"a TCP stream without its token": 1}


def test_the_token_may_come_in_pieces_and_messages_right_behind_it(tcp: Host) -> None:
    said = bytes.fromhex(tcp.where.partition("/")[2]) + b"".join(pack([b"hello"]))
    with tcp.raw(token=False) as peer:
        for at in range(len(said) - 1):
            peer.sendall(said[at : at + 1])
            assert tcp.next(0.001) is None
        peer.sendall(said[-1:])
        assert tcp.next() == (tcp.peer(1), [b"hello"])


def test_a_peer_that_leaves_before_its_whole_token_is_turned_away(tcp: Host) -> None:
    with tcp.raw(token=False) as peer:
        peer.sendall(bytes.fromhex(tcp.where.partition("/")[2])[:20])
    assert tcp.next(0.2) is None
    assert sum(tcp.listener.turned_away.values()) == 1
    assert tcp.listener.send(tcp.peer(1), [b"nobody"]) is None


def test_many_silent_connections_do_not_keep_a_worker_out(tcp: Host) -> None:
    silent = [tcp.raw(token=False) for _ in range(MOST_UNKNOWN + 20)]
    for _ in silent:
        assert tcp.listener.receive(0.0) is None
    channel = tcp.connect()
    tcp.introduce(channel)
    assert sum(tcp.listener.turned_away.values()) >= MOST_UNKNOWN
    for each in silent:
        each.close()
    channel.close()


def test_a_connection_that_stays_silent_is_closed_when_the_next_one_comes() -> None:
    clock, listening = ManualClock(), socket.create_server(("127.0.0.1", 0))
    where = listening.getsockname()
    options = StreamOptions(
        way=Way("test", "x"), admit=lambda _: True, token=b"word", refused="no token", largest_bytes=1000
    )
    listener = StreamListener(listening, options, clock)
    first = socket.create_connection(where)
    assert listener.receive(1.0) is None
    clock.advance(UNKNOWN_S / 2)
    second = socket.create_connection(where)
    assert listener.receive(1.0) is None and listener.turned_away == {}
    clock.advance(UNKNOWN_S / 2 + 0.1)
    third = socket.create_connection(where)
    assert listener.receive(1.0) is None and listener.turned_away == {"no token": 1}
    assert hangs_up(first)
    second.sendall(b"word" + b"".join(pack([b"in time"])))
    assert listener.receive(WAIT_S) == (b"\0stream-test/2", [b"in time"])
    for each in (second, third):
        each.close()
    listener.close()


def test_a_connection_that_is_not_admitted_is_closed_and_counted() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    options = StreamOptions(way=Way("test", "x"), admit=lambda _: False, refused="another user", largest_bytes=1000)
    listener = StreamListener(listening, options)
    with socket.create_connection(listening.getsockname()) as peer:
        assert listener.receive(1.0) is None
        assert hangs_up(peer)
    assert listener.turned_away == {"another user": 1}
    listener.close()
