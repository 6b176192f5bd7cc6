"""Lanes with threads of their own: large messages are handled and answered there, and whatever goes wrong ends the thread."""

import os
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.ports import free_ports
from tests.unit.transport.no_files import no_file_left
from torchquorum.transport.channel import Peer, Sent
from torchquorum.transport.codec import Frame
from torchquorum.transport.door import DoorChannel, DoorListener
from torchquorum.transport.lane import LARGE_BYTES, LaneChannel
from torchquorum.transport.lane_listener import CARRIED_BYTES
from torchquorum.transport.zmq_channel import ZmqChannel, ZmqListener

LARGEST = 64 << 20
WAIT_S = 30.0
LARGE = 300_000


class Host:
    """A listener as a ps has it, polled by a thread of this test's; `answer` says what comes back for a message."""

    def __init__(self, answer: Callable[[Peer, list[bytes]], list[tuple[Peer, list[bytes]]]]) -> None:
        self.address = f"localhost:{free_ports(1)[0]}"
        self.handled: dict[bytes, list[str]] = defaultdict(list)
        self.failed: list[BaseException] = []
        self.ways: list[Sent | None] = []
        self._answer, self._turn, self._over = answer, threading.Condition(), False
        self.listener = DoorListener(ZmqListener(self.address), lanes="127.0.0.1", take=self._take)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _take(self, peer: Peer, frames: list[Frame]) -> None:
        with self._turn:
            said = [bytes(f) for f in frames]
            self.handled[said[0]].append(threading.current_thread().name)
            for to, back in self._answer(peer, said):
                self.ways.append(self.listener.send(to, back))
            self._turn.notify_all()

    def wait_for(self, name: bytes) -> None:
        """Waits until a message with that header has been handled."""
        with self._turn:
            assert self._turn.wait_for(lambda: name in self.handled, WAIT_S)

    def nothing_is_on_its_way(self) -> bool:
        """Whether all memory that was sent from is free again, within a while: nobody tells."""
        deadline = time.monotonic() + WAIT_S
        while busy := [way for way in self.ways if way is not None and not way.done]:
            if time.monotonic() > deadline:
                return not busy
            time.sleep(0.001)
        return True

    def _run(self) -> None:
        try:
            while not self._over:
                if (received := self.listener.receive(0.05)) is not None:
                    self._take(*received)
        except BaseException as error:
            self.failed.append(error)

    def lane(self) -> LaneChannel:
        return LaneChannel("127.0.0.1", self.listener.lane, LARGEST)

    def pause(self) -> None:
        """Ends the thread that polls."""
        self._over = True
        self._thread.join(WAIT_S)

    def close(self) -> None:
        self.pause()
        self.listener.close()
        assert self.failed == []


def echo(peer: Peer, said: list[bytes]) -> list[tuple[Peer, list[bytes]]]:
    return [(peer, said)]


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(echo)
    yield made
    made.close()


def carriers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("torchquorum-lane/")]


def gone(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(WAIT_S)
    return not any(t.is_alive() for t in threads)


def received(channel: LaneChannel | ZmqChannel | DoorChannel) -> list[bytes]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (found := channel.receive(0.1)) is not None:
            return [bytes(f) for f in found]
    raise AssertionError("no answer")


@pytest.mark.parametrize("size", [LARGE_BYTES - 1, LARGE_BYTES, 1_590_000, CARRIED_BYTES[-1], CARRIED_BYTES[-1] + 1])
def test_what_is_large_is_handled_on_a_thread_of_the_lane_and_all_else_where_it_is_polled(
    host: Host, size: int
) -> None:
    lane, large = host.lane(), os.urandom(size)
    for name in (b"first", b"second"):
        lane.send([name, large, b"tail"])
        assert received(lane) == [name, large, b"tail"]
    carried = size in CARRIED_BYTES
    for name in (b"first", b"second"):
        assert [where == "torchquorum-lane/1" for where in host.handled[name]] == [carried]
    assert len(carriers()) == carried
    lane.close()
    assert gone(carriers())


def test_many_lanes_at_a_time_keep_their_messages_whole_and_in_order(host: Host) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        lane = host.lane()
        for k in range(20):
            large = bytes([number, k]) * (LARGE + number)
            lane.send([f"{number} {k}".encode(), large])
            if received(lane) != [f"{number} {k}".encode(), large]:
                failures.append(f"{number} {k}")
        lane.close()

    workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert failures == [] and sum(map(len, host.handled.values())) == 120
    assert {name for names in host.handled.values() for name in names} == {f"torchquorum-lane/{n}" for n in range(1, 7)}
    assert gone(carriers())


def test_both_sides_may_send_more_than_the_sockets_hold_at_the_same_time(host: Host) -> None:
    lane, large = host.lane(), os.urandom(CARRIED_BYTES[-1])
    numbers = [str(k).encode() for k in range(4)]

    def send_all() -> None:
        for number in numbers:  # while answers to the first are on their way, and nobody reads them yet
            lane.send([number, large])

    sending = threading.Thread(target=send_all)
    sending.start()
    sending.join(WAIT_S)
    assert not sending.is_alive() and not lane.closed
    assert received(lane) == [b"0", large]  # later ones may be lost: it does not take what it asked for
    lane.close()
    assert gone(carriers())


@pytest.mark.parametrize("end", ["closed in a frame", "reset", "nonsense", "hung up on"])
def test_whatever_ends_the_connection_ends_its_thread_and_frees_what_was_on_its_way(host: Host, end: str) -> None:
    port, _, word = host.listener.lane.partition("/")
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_connection(("127.0.0.1", int(port))) as peer:
        whole = struct.pack("<IQQ", 2, 5, LARGE) + b"first" + bytes(LARGE)
        peer.sendall(bytes.fromhex(word) + whole + struct.pack("<IQQ", 2, 5, LARGE) + b"again" + bytes(1000))
        host.wait_for(b"first")
        threads = carriers()
        assert list(host.handled) == [b"first"] and len(threads) == 1
        if end == "reset":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif end == "nonsense":
            peer.sendall(bytes(LARGE - 1000) + struct.pack("<I", 99))
        elif end == "hung up on":
            host.listener.hang_up(b"\0lane/1")
        if end in ("nonsense", "hung up on"):
            peer.settimeout(WAIT_S)
            with suppress(ConnectionError):
                while peer.recv(1 << 20):
                    pass
    assert gone(threads)
    host.ways.append(host.listener.send(b"\0lane/1", [b"late", bytes(LARGE)]))
    assert host.nothing_is_on_its_way()
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_never_pauses_is_hung_up_on_all_the_same() -> None:
    def hang_up(peer: Peer, said: list[bytes]) -> list[tuple[Peer, list[bytes]]]:
        host.listener.hang_up(peer)
        return [(peer, [b"the last word"])]

    host = Host(hang_up)
    port, _, word = host.listener.lane.partition("/")
    flood = struct.pack("<IQ", 1, 5) + b"again"
    with socket.create_connection(("127.0.0.1", int(port))) as peer:
        large = struct.pack("<IQQ", 2, 5, LARGE) + b"first" + bytes(LARGE)
        peer.sendall(bytes.fromhex(word) + large + 5000 * flood)
        host.wait_for(b"first")
        assert gone(carriers())
    host.close()
    assert {name: len(where) for name, where in host.handled.items()} == {b"first": 1}


def test_without_a_file_for_a_thread_of_its_own_a_lane_works_as_well(host: Host) -> None:
    lane, large = host.lane(), os.urandom(LARGE)
    lane.send([b"small"])
    assert received(lane) == [b"small"]
    with no_file_left():
        lane.send([b"without", large])
        assert received(lane) == [b"without", large]
        assert carriers() == []
    lane.send([b"with", large])
    assert received(lane) == [b"with", large] and len(carriers()) == 1
    lane.close()
    assert gone(carriers())


def test_answers_to_others_reach_them_from_a_lanes_thread_by_whichever_way_they_came() -> None:
    peers: dict[bytes, Peer] = {}

    def tell_all(peer: Peer, said: list[bytes]) -> list[tuple[Peer, list[bytes]]]:
        if said[0] != b"tell all":
            peers[said[0]] = peer
            return [(peer, [b"welcome"])]
        return [(to, [b"told", said[1]]) for to in peers.values()]

    host = Host(tell_all)
    lanes = [host.lane(), host.lane()]
    outside = ZmqChannel(host.address, b"outside")
    channels = {b"large lane": lanes[0], b"small lane": lanes[1], b"outside": outside}
    for name, channel in channels.items():
        channel.send([name])
        assert received(channel) == [b"welcome"]
    large = os.urandom(LARGE)
    for _ in range(3):
        lanes[0].send([b"tell all", large])
        for channel in channels.values():
            assert received(channel) == [b"told", large]
    assert set(host.handled[b"tell all"]) == {"torchquorum-lane/1"}
    assert host.nothing_is_on_its_way()
    for channel in channels.values():
        channel.close()
    host.close()
    assert gone(carriers())


def test_what_was_answered_before_the_end_is_still_delivered() -> None:
    host = Host(echo)
    lane, large = host.lane(), os.urandom(LARGE)
    lane.send([b"once", large])
    assert received(lane) == [b"once", large]
    host.pause()
    for k in range(50):
        host.listener.send(b"\0lane/1", [str(k).encode()])
    host.close()
    assert [received(lane) for _ in range(50)] == [[str(k).encode()] for k in range(50)]
    assert lane.receive(WAIT_S) is None and lane.closed
    lane.close()
