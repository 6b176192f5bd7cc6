"""Lanes over real sockets: large messages whole and in order, strangers and slow readers cost little."""

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest

from tests.unit.transport.no_files import no_file_left
from torchquorum.transport import lane as lane_module
from torchquorum.transport.codec import Frame
from torchquorum.transport.lane import LaneChannel, Pieces
from torchquorum.transport.lane_listener import LARGE_AHEAD, MOST_STRANGERS, LaneListener

LARGEST = 64 << 20


class Host:
    """A listener with the poll loop that a ps has around it."""

    def __init__(self) -> None:
        self.poll = select.poll()
        self.lanes = LaneListener("127.0.0.1", LARGEST, self._watch)

    def _watch(self, fd: int, writing: bool | None) -> None:
        if writing is None:
            self.poll.unregister(fd)
        else:
            self.poll.register(fd, select.POLLIN | (select.POLLOUT if writing else 0))

    def next(self, timeout_s: float = 30.0) -> tuple[bytes, list[bytes]] | None:
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            self.lanes.wake()
            for fd, _ in self.poll.poll(left_s * 1000):
                if self.lanes.owns(fd) and (message := self.lanes.ready(fd)) is not None:
                    return message[0], [bytes(f) for f in message[1]]
        return None

    def turn(self) -> None:
        """Does what can be done now, without waiting."""
        self.lanes.wake()
        for fd, _ in self.poll.poll(0):
            if self.lanes.owns(fd):
                assert self.lanes.ready(fd) is None


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.lanes.close()


def connect(host: Host) -> LaneChannel:
    return LaneChannel("127.0.0.1", host.lanes.name, LARGEST)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 1_590_000, 9_000_001])
def test_messages_of_all_sizes_arrive_whole_both_ways(host: Host, size: int) -> None:
    lane, large = connect(host), os.urandom(size)
    lane.send([b"small"])
    assert host.next() == (b"\0lane/1", [b"small"])
    if size < 4_000_000:  # what fits into the sockets' own room, as nobody reads meanwhile
        lane.send([b"head", large, b"", b"tail"])
        assert host.next() == (b"\0lane/1", [b"head", large, b"", b"tail"])
    host.lanes.send(b"\0lane/1", [b"answer", large])
    received = None
    deadline = time.monotonic() + 30
    while received is None and time.monotonic() < deadline:
        host.turn()
        received = lane.receive(0.01)
    assert received is not None and [bytes(f) for f in received] == [b"answer", large]
    lane.close()
    assert host.next(0.2) is None and host.lanes.send(b"\0lane/1", [b"to nobody"]) is None


def test_a_large_frame_stays_as_it_is_until_the_next_but_one(host: Host) -> None:
    lane = connect(host)
    seen = []
    for letter in (b"a", b"b"):
        lane.send([b"h", letter * 70_000])
        message = None
        while message is None:
            host.lanes.wake()
            for fd, _ in host.poll.poll(1000):
                message = host.lanes.ready(fd) or message
        seen.append(message[1][1])
    assert [bytes(f)[:1] for f in seen] == [b"a", b"b"]
    lane.close()


def test_who_does_not_know_the_word_is_turned_away(host: Host) -> None:
    port = int(host.lanes.name.partition("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(os.urandom(32) + struct.pack("<IQ", 1, 5) + b"hello")
        assert host.next(0.3) is None
        assert host.lanes.turned_away == 1
        stranger.settimeout(30)
        with suppress(ConnectionError):
            assert stranger.recv(1) == b""


def test_many_silent_strangers_do_not_keep_a_worker_out(host: Host) -> None:
    port = int(host.lanes.name.partition("/")[0])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_STRANGERS + 20)]
    for _ in strangers:
        host.turn()
    lane = connect(host)
    lane.send([b"here I am"])
    found = host.next()
    assert found is not None and found[1] == [b"here I am"]
    for s in strangers:
        s.close()
    lane.close()


@pytest.mark.parametrize(
    "bytes_said",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 17),
        struct.pack("<IQ", 1, 1 << 60),
        struct.pack("<IQQ", 2, 5, LARGEST + 1),
        struct.pack("<IQ", 1, (16 << 20) + 1),
    ],
)
def test_what_makes_no_sense_ends_the_connection_and_costs_no_memory(host: Host, bytes_said: bytes) -> None:
    port, _, word = host.lanes.name.partition("/")
    with socket.create_connection(("127.0.0.1", int(port))) as peer:
        peer.sendall(bytes.fromhex(word) + bytes_said)
        assert host.next(0.3) is None
        peer.settimeout(30)
        with suppress(ConnectionError):
            assert peer.recv(1) == b""


def test_a_reader_that_does_not_read_loses_answers_and_holds_nobody_up(host: Host) -> None:
    lane = connect(host)
    lane.send([b"hello"])
    assert host.next() is not None
    large = bytes(20 << 20)
    ways = [host.lanes.send(b"\0lane/1", [b"h", large]) for _ in range(10)]
    assert sum(way is not None for way in ways) == LARGE_AHEAD
    lane.close()
    assert host.next(0.3) is None
    assert all(way is None or way.done for way in ways)


def test_a_lane_whose_ps_is_gone_says_so(host: Host) -> None:
    lane = connect(host)
    lane.send([b"hello"])
    assert host.next() is not None
    host.lanes.hang_up(b"\0lane/1")
    assert lane.receive(5.0) is None and lane.closed
    lane.send([b"x" * 100_000])
    lane.close()


def test_the_word_may_come_in_pieces_and_messages_right_behind_it(host: Host) -> None:
    port, _, word = host.lanes.name.partition("/")
    said = bytes.fromhex(word) + struct.pack("<IQ", 1, 5) + b"hello"
    with socket.create_connection(("127.0.0.1", int(port))) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(said) - 1):
            peer.sendall(said[at : at + 1])
            assert host.next(0.001) is None
        peer.sendall(said[-1:])
        assert host.next() == (b"\0lane/1", [b"hello"])


def test_who_leaves_before_the_whole_word_was_no_guest(host: Host) -> None:
    port, _, word = host.lanes.name.partition("/")
    with socket.create_connection(("127.0.0.1", int(port))) as peer:
        peer.sendall(bytes.fromhex(word)[:20])
    assert host.next(0.2) is None
    assert host.lanes.turned_away == 1 and host.lanes._guests == {}


def test_a_message_larger_than_all_buffers_goes_through_while_the_other_side_reads(host: Host) -> None:
    lane, large = connect(host), os.urandom(40 << 20)
    found: list[tuple[bytes, list[bytes]] | None] = []
    reading = threading.Thread(target=lambda: found.append(host.next()))
    reading.start()
    lane.send([b"head", large])
    reading.join(30)
    assert found == [(b"\0lane/1", [b"head", large])] and not lane.closed
    way = host.lanes.send(b"\0lane/1", [b"answer", large])
    assert way is not None and not way.done
    received = None
    deadline = time.monotonic() + 30
    while received is None and time.monotonic() < deadline:
        host.turn()
        received = lane.receive(0.01)
    assert received is not None and bytes(received[1]) == large and way.done
    lane.close()


def test_a_ps_that_does_not_read_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "SEND_S", 0.1)
    lane = connect(host)
    lane.send([b"head", bytes(64 << 20)])
    assert lane.closed
    lane.close()


class Stranger:
    """Somebody who listens where a ps should."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.lane = LaneChannel("127.0.0.1", f"{self._listening.getsockname()[1]}/{'00' * 32}", LARGEST)
        self.peer = self._listening.accept()[0]

    def reset(self) -> None:
        """Ends the connection as a host that was switched off and on does."""
        self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.peer.close()

    def close(self) -> None:
        self.lane.close()
        self.peer.close()
        self._listening.close()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    made = Stranger()
    yield made
    made.close()


def test_a_ps_that_sends_what_makes_no_sense_is_given_up(stranger: Stranger) -> None:
    stranger.peer.sendall(struct.pack("<I", 17))
    assert stranger.lane.receive(30.0) is None and stranger.lane.closed


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_connection_that_was_cut_is_noticed_whatever_is_done_with_it(stranger: Stranger, way: str) -> None:
    poll = select.poll()
    poll.register(stranger.lane._socket, select.POLLIN)
    stranger.reset()
    assert poll.poll(30_000)
    if way == "send":
        stranger.lane.send([b"hello"])
    else:
        assert stranger.lane.receive(30.0) is None
    assert stranger.lane.closed


def test_an_answer_to_a_worker_that_was_cut_off_is_lost_and_no_error(host: Host) -> None:
    lane = connect(host)
    lane.send([b"hello"])
    assert host.next() is not None
    [(fd, guest)] = host.lanes._guests.items()
    lane._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    lane.close()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(30_000)
    assert host.lanes.send(guest.peer, [b"late"]) is None and host.lanes._guests == {}
    host.lanes.hang_up(guest.peer)  # who is gone already
    assert host.lanes.send(guest.peer, [b"later still"]) is None


def test_a_lane_that_cannot_be_offered_or_reached_is_an_error_of_the_system(host: Host) -> None:
    with pytest.raises(OSError, match="assign"):
        LaneListener("192.0.2.1", LARGEST, lambda *_: None)
    with pytest.raises(ValueError, match="hex"):
        LaneChannel("127.0.0.1", host.lanes.name + "no word", LARGEST)
    assert host.next(0.2) is None  # the one without a word is gone, too


def test_no_file_left_costs_the_newcomer_and_nobody_else(host: Host) -> None:
    lane = connect(host)
    lane.send([b"hello"])
    assert host.next() is not None
    late = connect(host)
    with no_file_left():
        host.turn()
        assert late.receive(30.0) is None and late.closed  # shown out at once: it goes by ZeroMQ
        assert host.poll.poll(0) == []  # and nobody is awake for its sake
        lane.send([b"still here"])
        assert host.next() == (b"\0lane/1", [b"still here"])
    again = connect(host)
    again.send([b"at last"])
    assert host.next() == (b"\0lane/2", [b"at last"])
    for each in (lane, late, again):
        each.close()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_large_frame_goes_from_pieces_of_memory_into_pieces_that_the_receiver_chose(host: Host, wanted: bool) -> None:
    lane, large = connect(host), os.urandom(200_000)
    memory = bytearray(len(large))
    pieces = [memoryview(memory)[:70_001], memoryview(memory)[70_001:]]
    asked: list[tuple[bytes, list[int]]] = []

    def choose(header: Frame, sizes: Sequence[int]) -> Sequence[memoryview] | None:
        asked.append((bytes(header), list(sizes)))
        return pieces if wanted else None

    lane.receive_into(choose)
    lane.send([b"head", Pieces([memoryview(large)[:5], memoryview(large)[5:]]), b"tail"])
    assert host.next() == (b"\0lane/1", [b"head", large, b"tail"])
    for number in (b"1", b"2"):
        host.lanes.send(b"\0lane/1", [number, large, b"tail"])
        received = None
        deadline = time.monotonic() + 30
        while received is None and time.monotonic() < deadline:
            host.turn()
            received = lane.receive(0.01)
        assert received is not None and [bytes(received[0]), bytes(received[2])] == [number, b"tail"]
        assert (bytes(memory) == large) is wanted and (bytes(received[1]) == large) is not wanted
        memory[:] = bytes(len(large))
    assert asked == [(b"1", [200_000, 4]), (b"2", [200_000, 4])]
    lane.close()
