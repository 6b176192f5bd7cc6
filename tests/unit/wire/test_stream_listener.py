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
from torchquorum.wire.opening import OPEN, RefusedConnection
from torchquorum.wire.refusals import OTHER_PROTOCOL, TOO_MANY, TOO_SLOW, UNFINISHED
from torchquorum.wire.stream import SocketStream, pack
from torchquorum.wire.stream_listener import LARGE_AHEAD, MOST_UNKNOWN, UNKNOWN_S, StreamListener, StreamOptions


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


@pytest.fixture
def tcp() -> Iterator[Host]:
    made = Host("tcp")
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
        until(lambda: host.listener.receive(0.0) is None and host.listener.may_wait_s() == FOREVER_S)


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
    with tcp.dial() as peer:
        peer.sendall(OPEN + b"".join(pack([b"hello"])))
        received = tcp.next()
        assert received is not None
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: tcp.listener.send(received[0], [b"late"]) is None and tcp.listener.receive(0.01) is None)
    assert tcp.listener.send(received[0], [b"later still"]) is None


def test_no_descriptor_left_costs_the_new_connection_and_no_other(host: Host) -> None:
    channel = host.connect()
    peer = host.introduce(channel)
    late = host.dial()
    with no_file_left():
        assert host.listener.receive(0.0) is None
        assert hangs_up(late)  # refused at once: its owner tries again, or uses another transport
        assert host.listener.turned_away == {TOO_MANY: 1}
        channel.send([b"still here"])
        assert host.next() == (peer, [b"still here"])
    again = host.connect()
    assert host.introduce(again) == host.peer(2)
    for each in (channel, again):
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
        host.dial()
    host.listener = Host(host.kind).listener  # for the fixture to close


# -- before a connection is admitted --------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "tls"])
def entry(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", bytes(500), bytes(range(100, 256))])
def test_what_is_no_greeting_is_closed_and_counted(entry: Host, said: bytes) -> None:
    with entry.dial() as stranger:
        stranger.sendall(said + b"".join(pack([b"hello"])))
        until(lambda: entry.pump() or entry.listener.turned_away)
        assert hangs_up(stranger)
    assert entry.listener.turned_away == {OTHER_PROTOCOL: 1}


def test_the_greeting_may_come_in_pieces_and_messages_right_behind_it(tcp: Host) -> None:
    said = OPEN + b"".join(pack([b"hello"]))
    with tcp.dial() as peer:
        for at in range(len(said) - 1):
            peer.sendall(said[at : at + 1])
            assert tcp.next(0.001) is None
        peer.sendall(said[-1:])
        assert tcp.next() == (tcp.peer(1), [b"hello"])


def test_a_peer_that_leaves_before_its_whole_greeting_is_counted(entry: Host) -> None:
    with entry.dial() as peer:
        peer.sendall(OPEN[:7])
    until(lambda: entry.pump() or entry.listener.turned_away)
    assert entry.listener.turned_away == {UNFINISHED: 1}
    assert entry.listener.send(entry.peer(1), [b"nobody"]) is None


def test_a_half_greeting_costs_no_busy_loop(entry: Host) -> None:
    with entry.dial() as peer:
        peer.sendall(b"\x16\x03\x01\x02\x00" if entry.kind == "tls" else OPEN[:7])
        assert entry.next(0.1) is None
        started = time.process_time()
        assert entry.next(0.5) is None
        assert time.process_time() - started < 0.2


def test_many_silent_connections_do_not_keep_a_worker_out(entry: Host) -> None:
    silent = [entry.dial() for _ in range(MOST_UNKNOWN + 20)]
    until(lambda: entry.pump() or entry.listener.turned_away.get(TOO_MANY, 0) >= 20)
    channel = entry.connect()
    entry.introduce(channel)
    assert hangs_up(silent[0])  # the oldest had the most time
    for each in silent:
        each.close()
    channel.close()


def test_beyond_the_most_connections_newcomers_are_hung_up_on() -> None:
    said: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))
    options = StreamOptions(kind="test", opening=Word, largest_bytes=1000, most=5, say=said.append)
    listener = StreamListener(listening, options)
    guests = [socket.create_connection(listening.getsockname()) for _ in range(8)]
    until(lambda: listener.receive(0.0) is None and listener.turned_away == {TOO_MANY: 3} and said)
    assert said[0].startswith("turned a connection away: too many connections, from 127.0.0.1")
    for late in guests[5:]:
        assert hangs_up(late)
    for guest in guests:
        guest.close()
    listener.close()


class Word:
    """Admits who says a word."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted

    def advance(self) -> SocketStream:
        if self._socket.recv(4) != b"word":
            raise RefusedConnection("another word")
        return SocketStream.of(self._socket)


def test_a_connection_that_stays_silent_is_closed_in_time_though_no_other_comes() -> None:
    clock, listening = ManualClock(), socket.create_server(("127.0.0.1", 0))
    where = listening.getsockname()
    listener = StreamListener(listening, StreamOptions(kind="test", opening=Word, largest_bytes=1000), clock)
    first = socket.create_connection(where)
    assert listener.receive(1.0) is None
    clock.advance(UNKNOWN_S / 2)
    second = socket.create_connection(where)
    assert listener.receive(1.0) is None and listener.turned_away == {}
    clock.advance(UNKNOWN_S / 2 + 0.1)
    assert listener.may_wait_s() <= 1.0
    assert listener.receive(0.0) is None and listener.turned_away == {TOO_SLOW: 1}
    assert hangs_up(first)
    second.sendall(b"word" + b"".join(pack([b"in time"])))
    found: list[object] = []
    until(lambda: found.append(listener.receive(0.1)) or found[-1])
    assert found[-1] == (b"\0stream-test/1", [b"in time"])
    second.close()
    listener.close()


def test_a_connection_that_is_not_admitted_is_closed_and_counted() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    listener = StreamListener(listening, StreamOptions(kind="test", opening=Word, largest_bytes=1000))
    with socket.create_connection(listening.getsockname()) as peer:
        peer.sendall(b"none")
        until(lambda: listener.receive(0.1) is None and listener.turned_away)
        assert hangs_up(peer)
    assert listener.turned_away == {"another word": 1}
    listener.close()


def test_what_is_only_announced_takes_no_memory(tcp: Host) -> None:
    before = resident_bytes()
    peers = [tcp.raw() for _ in range(10)]
    for peer in peers:
        peer.sendall(struct.pack("<IQQ", 2, 5, 200 << 20) + b"first" + bytes(100_000))
    assert tcp.next(0.2) is None
    assert resident_bytes() - before < 100 << 20
    for peer in peers:
        peer.close()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
