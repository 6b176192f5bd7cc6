"""Several transports as one listener: all are heard, none holds up another, and answers go where the question came from."""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.ports import free_port
from torchquorum.clock import SYSTEM
from torchquorum.wire import transports
from torchquorum.wire.channel import Channel, Listener
from torchquorum.wire.codec import Frame
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.inprocess import InProcessNetwork
from torchquorum.wire.transport import Listening
from torchquorum.wire.unix_stream import UNIX

WAIT_S = 30.0


class Host:
    """A ps task's listener with all transports."""

    def __init__(self) -> None:
        self.address = f"localhost:{free_port()}"
        self.listener: Listener = transports.listen(Listening(address=self.address))
        self.ways = {way.kind: way.where for way in self.listener.ways}

    def connect(self, kind: str) -> Channel:
        if kind == "entry":
            return EntryChannel(self.address)
        transport = transports.find(kind)
        assert transport is not None
        return transport.connect("127.0.0.1", self.ways[kind], SYSTEM)

    def take(self, *pumped: Channel) -> tuple[bytes, list[Frame]]:
        """Returns what comes; channels that are pumped go on connecting meanwhile."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if (received := self.listener.receive(0.01)) is not None:
                return received
            for channel in pumped:
                assert channel.receive(0.0) is None
        raise AssertionError("nothing came")


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.listener.close()


def test_ways_are_listed_best_first_and_the_entry_is_none_of_them(host: Host) -> None:
    assert [way.kind for way in host.listener.ways] == [UNIX.kind]


def test_all_transports_work_side_by_side_and_each_peer_can_be_hung_up_on(host: Host) -> None:
    channels = {kind.encode(): host.connect(kind) for kind in ("entry", "unix")}
    for name, channel in channels.items():
        channel.send([name])
    peers = {bytes(frames[0]): peer for peer, frames in (host.take(*channels.values()) for _ in channels)}
    assert peers.keys() == channels.keys()
    for name, peer in peers.items():
        assert host.listener.send(peer, [b"to " + name]) is None
    for name, channel in channels.items():
        assert channel.receive(WAIT_S) == [b"to " + name]
    for peer in peers.values():
        host.listener.hang_up(peer)
    assert channels[b"unix"].receive(WAIT_S) is None and channels[b"unix"].closed
    assert host.listener.turned_away == {"talks too much": 2}
    entry = channels[b"entry"]
    assert entry.receive(0.01) is None
    entry.send([b"once more"])  # it connects again by itself
    deadline = time.monotonic() + WAIT_S
    while (received := host.listener.receive(0.01)) is None and time.monotonic() < deadline:
        assert entry.receive(0.01) is None
    assert received is not None and received[1] == [b"once more"] and received[0] not in peers.values()
    for channel in channels.values():
        channel.close()


def test_a_flood_on_one_transport_does_not_hold_up_another(host: Host) -> None:
    flood, calm = host.connect("entry"), host.connect("unix")
    flood.send([b"flood"])
    host.take(flood)
    for _ in range(200):
        flood.send([b"flood"])
    calm.send([b"calm"])
    time.sleep(0.1)  # all of it is there
    heard = [bytes(host.take()[1][0]) for _ in range(20)]
    assert b"calm" in heard and heard.count(b"flood") == 19
    flood.close()
    calm.close()


def test_a_receiver_that_waits_can_be_woken_from_another_thread(host: Host) -> None:
    timer = threading.Timer(0.05, host.listener.wake)
    timer.start()
    started = time.monotonic()
    assert host.listener.receive(WAIT_S) is None and time.monotonic() - started < WAIT_S / 2
    timer.join()


@pytest.mark.parametrize("kind", ["entry", "unix"])
def test_what_another_thread_sends_is_sent_by_the_one_that_receives(host: Host, kind: str) -> None:
    channel = host.connect(kind)
    channel.send([b"hello"])
    peer, _ = host.take(channel)
    sent = []
    thread = threading.Thread(target=lambda: sent.append(host.listener.send(peer, [b"from a thread"])))
    thread.start()
    thread.join(WAIT_S)
    assert sent[0] is not None and not sent[0].done
    assert host.listener.receive(WAIT_S) is None  # woken, it sends
    assert sent[0].done and channel.receive(WAIT_S) == [b"from a thread"]
    channel.close()


def test_wait_ends_when_something_has_come_here_or_on_another_channel(host: Host) -> None:
    address = f"localhost:{free_port()}"
    shard_0, leader = transports.listen_at_entry(Listening(address=address)), EntryChannel(address)
    leader.send([b"hello"])
    deadline = time.monotonic() + WAIT_S
    while (received := shard_0.receive(0.01)) is None and time.monotonic() < deadline:
        host.listener.wait([leader], 0.01)
        assert leader.receive(0.0) is None
    assert received is not None
    host.listener.wait([leader], 0.01)
    shard_0.send(received[0], [b"log"])
    started = time.monotonic()
    host.listener.wait([leader], WAIT_S)
    assert leader.receive(0.0) is not None
    channel = host.connect("unix")
    channel.send([b"x"])
    deadline = time.monotonic() + WAIT_S
    while (message := host.listener.receive(0.0)) is None and time.monotonic() < deadline:
        host.listener.wait([leader], WAIT_S)
    assert message is not None and time.monotonic() - started < WAIT_S / 2
    channel.send([b"y"])
    while host.listener.may_wait_s() > 0 and time.monotonic() < deadline:
        host.listener.wait([], 0.1)
    host.listener.wait([leader], 10 * WAIT_S)  # at once: something is here already
    assert host.take()[1] == [b"y"] and time.monotonic() - started < WAIT_S
    for each in (channel, leader, shard_0):
        each.close()


def test_a_channel_without_a_descriptor_is_looked_at_often(host: Host) -> None:
    network = InProcessNetwork()
    other = network.connect("there:1", b"w")
    network.listen("there:1").send(b"w", [b"x"])
    started = time.monotonic()
    host.listener.wait([other], WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2
