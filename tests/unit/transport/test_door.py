"""The way in for tasks of the same host: real Unix sockets."""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.ports import free_port
from tests.unit.transport.no_files import no_file_left
from torchquorum.errors import ClusterError
from torchquorum.transport.codec import Frame
from torchquorum.transport.door import MAX_PACKET_BYTES, DoorChannel, DoorListener, _pack, _unpack
from torchquorum.transport.lane import LaneChannel
from torchquorum.transport.zmq_channel import ZmqChannel, ZmqListener

WAIT_S = 10.0


@pytest.fixture
def address() -> str:
    return f"localhost:{free_port()}"


@pytest.fixture
def listener(address: str) -> Iterator[DoorListener]:
    listener = DoorListener(ZmqListener(address))
    yield listener
    listener.close()


@pytest.fixture
def channel(listener: DoorListener) -> Iterator[DoorChannel]:
    channel = DoorChannel(listener.name)
    yield channel
    channel.close()


def take(listener: DoorListener) -> tuple[bytes, list[Frame]]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (received := listener.receive(0.1)) is not None:
            return received
    raise AssertionError("nothing came")


def let_in(listener: DoorListener, guests: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(listener._guests) != guests and time.monotonic() < deadline:
        assert listener.receive(0.02) is None
    assert len(listener._guests) == guests


@given(st.lists(st.binary(max_size=50), max_size=16))
def test_frames_survive_packing(frames: list[bytes]) -> None:
    assert [bytes(f) for f in _unpack(_pack(frames))] == frames


@settings(max_examples=300)
@given(st.binary(max_size=100))
def test_any_packet_can_be_unpacked_and_holds_no_more_than_came(packet: bytes) -> None:
    frames = _unpack(packet)
    assert sum(len(f) for f in frames) <= len(packet)


def test_a_packet_that_lies_about_its_sizes_is_cut_short() -> None:
    assert [bytes(f) for f in _unpack(struct.pack("<3I", 2, 2**32 - 1, 5) + b"abc")] == [b"abc", b""]
    assert [bytes(f) for f in _unpack(struct.pack("<I", 2**32 - 1))] == [struct.pack("<I", 2**32 - 1)]


def test_a_message_goes_in_and_its_answer_comes_out(listener: DoorListener, channel: DoorChannel) -> None:
    channel.send([b"header", memoryview(b"tensor")])
    peer, frames = take(listener)
    assert [bytes(f) for f in frames] == [b"header", b"tensor"]
    assert listener.send(peer, [b"answer"]) is None
    answer = channel.receive(WAIT_S)
    assert answer is not None and [bytes(f) for f in answer] == [b"answer"]


def test_both_ways_in_work_side_by_side(listener: DoorListener, channel: DoorChannel, address: str) -> None:
    outside = ZmqChannel(address, b"outside")
    try:
        outside.send([b"tcp"])
        channel.send([b"door"])
        found = {peer: bytes(frames[0]) for peer, frames in (take(listener), take(listener))}
        assert sorted(found.values()) == [b"door", b"tcp"]
        for peer in found:
            listener.send(peer, [b"to " + found[peer]])
        answers = outside.receive(WAIT_S), channel.receive(WAIT_S)
        assert [bytes(a[0]) for a in answers if a] == [b"to tcp", b"to door"]
    finally:
        outside.close()


def test_a_stranger_who_takes_a_name_like_that_of_a_door_is_answered_over_tcp(
    listener: DoorListener, channel: DoorChannel, address: str
) -> None:
    channel.send([b"x"])
    take(listener)
    stranger = ZmqChannel(address, b"door/1")
    try:
        stranger.send([b"y"])
        peer, _ = take(listener)
        listener.send(peer, [b"for the stranger"])
        answer = stranger.receive(WAIT_S)
        assert answer is not None and bytes(answer[0]) == b"for the stranger"
        assert channel.receive(0.01) is None
    finally:
        stranger.close()


def test_an_answer_to_a_guest_who_left_does_not_reach_the_next_one(listener: DoorListener) -> None:
    first = DoorChannel(listener.name)
    first.send([b"x"])
    peer, _ = take(listener)
    first.close()
    let_in(listener, 0)
    second = DoorChannel(listener.name)
    try:
        second.send([b"y"])
        next_peer, _ = take(listener)
        assert next_peer != peer
        listener.send(peer, [b"late"])
        listener.send(next_peer, [b"mine"])
        answer = second.receive(WAIT_S)
        assert answer is not None and bytes(answer[0]) == b"mine"
    finally:
        second.close()


def test_a_guest_that_does_not_read_does_not_block_the_ps(listener: DoorListener, channel: DoorChannel) -> None:
    channel.send([b"x"])
    peer, _ = take(listener)
    started = time.monotonic()
    for _ in range(2000):
        listener.send(peer, [bytes(10_000)])
    assert time.monotonic() - started < WAIT_S
    other = DoorChannel(listener.name)
    try:
        other.send([b"still here"])
        assert bytes(take(listener)[1][0]) == b"still here"
    finally:
        other.close()


def test_a_ps_that_does_not_read_does_not_block_a_worker(channel: DoorChannel) -> None:
    started = time.monotonic()
    for _ in range(2000):
        channel.send([bytes(10_000)])
    assert time.monotonic() - started < WAIT_S


def test_garbage_through_the_door_is_handed_on_for_the_codec_to_refuse(listener: DoorListener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
        guest.connect("\0" + listener.name)
        for packet in (b"\x00", b"\xff" * 9, bytes(4)):
            guest.send(packet)
            _, frames = take(listener)
            assert sum(len(f) for f in frames) <= len(packet)


def test_a_packet_larger_than_allowed_is_cut(listener: DoorListener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
        guest.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        guest.connect("\0" + listener.name)
        try:
            guest.send(_pack([bytes(MAX_PACKET_BYTES + 1000)]))
        except OSError:
            pytest.skip("this system's sockets are smaller than that")
        _, frames = take(listener)
        assert sum(len(f) for f in frames) < MAX_PACKET_BYTES


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_another_user_is_not_let_in(listener: DoorListener) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
                guest.settimeout(WAIT_S)
                guest.connect("\0" + listener.name)
                code = 0 if guest.recv(10) == b"" else 2
        except ConnectionError:
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + WAIT_S
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        assert listener.receive(0.02) is None
        done, status = os.waitpid(child, os.WNOHANG)
    assert done and os.waitstatus_to_exitcode(status) == 0
    assert listener._guests == {}


def test_a_door_has_no_file_and_is_gone_when_closed(address: str) -> None:
    listener = DoorListener(ZmqListener(address))
    assert "@" + listener.name in Path("/proc/net/unix").read_text()
    listener.close()
    assert "@" + listener.name not in Path("/proc/net/unix").read_text()
    with pytest.raises(OSError, match="refused"):
        DoorChannel(listener.name)


def test_a_worker_whose_ps_is_gone_receives_nothing_and_does_not_spin(address: str) -> None:
    listener = DoorListener(ZmqListener(address))
    channel = DoorChannel(listener.name)
    let_in(listener, 1)
    listener.close()
    started = time.monotonic()
    channel.send([b"x"])
    assert channel.receive(0.2) is None
    assert time.monotonic() - started >= 0.04
    channel.close()


def test_a_guest_that_leaves_is_forgotten(listener: DoorListener) -> None:
    guests = [DoorChannel(listener.name) for _ in range(3)]
    let_in(listener, 3)
    peers = list(listener._peers)
    for guest in guests:
        guest.close()
    let_in(listener, 0)
    assert listener._guests == {} and listener._peers == {}
    assert all(listener.send(peer, [b"too late"]) is None for peer in peers)
    with closing(DoorChannel(listener.name)) as newcomer:
        let_in(listener, 1)
        assert not set(listener._peers) & set(peers)  # nobody gets a place, and its answers, a second time
        assert newcomer.receive(0.0) is None


def test_wait_also_watches_the_way_to_shard_0(listener: DoorListener) -> None:
    address = f"localhost:{free_port()}"
    shard_0 = ZmqListener(address)
    leader = ZmqChannel(address, b"ps/1")
    try:
        leader.send([b"hello"])
        received = shard_0.receive(WAIT_S)
        assert received is not None
        listener.wait([leader], 0.01)
        shard_0.send(received[0], [b"log"])
        started = time.monotonic()
        listener.wait([leader], WAIT_S)
        assert time.monotonic() - started < WAIT_S / 2
        assert leader.receive(0.0) is not None
    finally:
        leader.close()
        shard_0.close()


@pytest.mark.parametrize("timeout_s", [0.0, 0.2])
def test_a_door_closed_by_the_other_side_is_noticed_without_waiting(address: str, timeout_s: float) -> None:
    listener = DoorListener(ZmqListener(address))
    channel = DoorChannel(listener.name)
    try:
        let_in(listener, 1)
        assert channel.receive(0.0) is None and not channel.closed
        listener.close()
        assert channel.receive(timeout_s) is None
        assert channel.closed
    finally:
        channel.close()


def test_a_guest_for_whom_no_file_is_left_is_shown_out_and_may_come_again(listener: DoorListener) -> None:
    guest = DoorChannel(listener.name)
    with no_file_left():
        assert listener.receive(0.0) is None
    assert guest.receive(0.2) is None and guest.closed
    guest.close()
    again = DoorChannel(listener.name)
    again.send([b"hello"])
    assert bytes(take(listener)[1][0]) == b"hello"
    again.close()


def test_no_file_left_for_a_door_is_an_error_that_says_where_to_look(address: str) -> None:
    with (
        closing(ZmqListener(address)) as outside,
        no_file_left(),
        pytest.raises(ClusterError, match="no door for the tasks of this host: Too many open files; see ulimit -n"),
    ):
        DoorListener(outside)


def test_who_talks_too_much_loses_his_connection_by_whichever_way_he_came(address: str) -> None:
    listener = DoorListener(ZmqListener(address), lanes="127.0.0.1")
    guest, outside = DoorChannel(listener.name), ZmqChannel(address, b"outside")
    lane = LaneChannel("127.0.0.1", listener.lane, 1 << 20)
    peers: dict[bytes, bytes] = {}
    for name, channel in ((b"door", guest), (b"outside", outside), (b"lane", lane)):
        channel.send([name])
        peer, frames = take(listener)
        peers[bytes(frames[0])] = peer
    assert peers.keys() == {b"door", b"outside", b"lane"}
    for name, peer in peers.items():
        assert listener.send(peer, [b"to " + name]) is None
    for name, channel in ((b"door", guest), (b"outside", outside), (b"lane", lane)):
        answer = channel.receive(WAIT_S)
        assert answer is not None and bytes(answer[0]) == b"to " + name
    for peer in peers.values():
        listener.hang_up(peer)
    deadline = time.monotonic() + WAIT_S
    while not (guest.closed and lane.closed) and time.monotonic() < deadline:
        assert listener.receive(0.01) is None
        assert guest.receive(0.01) is None and lane.receive(0.01) is None
    assert guest.closed and lane.closed and listener._guests == {}
    outside.send([b"once more"])  # this one is hung up on with the next thing it says
    while listener.turned_away.get("talks too much", 0) == 0 and time.monotonic() < deadline:
        listener.receive(0.01)
    assert listener.turned_away == {"talks too much": 1}
    for channel in (guest, outside, lane):
        channel.close()
    listener.close()


def test_strangers_at_a_lane_are_counted_with_the_others(address: str) -> None:
    listener = DoorListener(ZmqListener(address), lanes="127.0.0.1")
    with socket.create_connection(("127.0.0.1", int(listener.lane.partition("/")[0]))) as stranger:
        stranger.sendall(bytes(32))
        deadline = time.monotonic() + WAIT_S
        while not listener.turned_away and time.monotonic() < deadline:
            assert listener.receive(0.01) is None
    assert listener.turned_away == {"a lane without its word": 1}
    listener.close()


def test_where_no_lane_can_be_offered_the_other_ways_are_open(address: str) -> None:
    listener = DoorListener(ZmqListener(address), lanes="192.0.2.1")  # an address of nobody
    guest = DoorChannel(listener.name)
    guest.send([b"hello"])
    assert listener.lane == "" and bytes(take(listener)[1][0]) == b"hello"
    guest.close()
    listener.close()


def test_waiting_ends_at_once_where_something_has_come_already(listener: DoorListener, channel: DoorChannel) -> None:
    other = DoorChannel(listener.name)
    let_in(listener, 2)
    channel.send([b"one"])
    other.send([b"two"])
    first = take(listener)
    deadline = time.monotonic() + WAIT_S
    while not listener._received and time.monotonic() < deadline:
        listener.wait([other], 0.1)
    started = time.monotonic()
    listener.wait([], 10 * WAIT_S)
    assert time.monotonic() - started < 5 * WAIT_S
    assert sorted(bytes(frames[0]) for _, frames in (first, take(listener))) == [b"one", b"two"]
    other.close()
