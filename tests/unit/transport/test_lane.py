"""Lanes over real sockets: large messages whole and in order, strangers and slow readers cost little."""

import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from torchquorum.transport.lane import LARGE_AHEAD, MOST_STRANGERS, LaneChannel, LaneListener

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
            for fd, _ in self.poll.poll(left_s * 1000):
                if self.lanes.owns(fd) and (message := self.lanes.ready(fd)) is not None:
                    return message[0], [bytes(f) for f in message[1]]
        return None

    def turn(self) -> None:
        """Does what can be done now, without waiting."""
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
