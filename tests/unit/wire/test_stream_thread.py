"""Connections with threads of their own: large messages are handled and answered there, and whatever goes wrong ends the thread."""

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
from tests.unit.wire.no_files import no_file_left
from tests.unit.wire.streams import LOCKED, settle
from torchquorum.clock import SYSTEM
from torchquorum.cluster.secret import OPEN as OPEN_TO_ALL
from torchquorum.cluster.secret import Access
from torchquorum.wire import transports
from torchquorum.wire.channel import Channel, Peer, Sent
from torchquorum.wire.codec import Frame
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.opening import OPEN
from torchquorum.wire.stream import LARGE_BYTES
from torchquorum.wire.tcp_stream import THREADED_BYTES
from torchquorum.wire.transport import Listening
from torchquorum.wire.unix_stream import UNIX

WAIT_S = 30.0
LARGE = 300_000
FIRST = b"\0stream-tcp/1"


class Host:
    """A listener as a ps has it, polled by a thread of this test's; `answer` says what comes back for a message."""

    def __init__(
        self, answer: Callable[[Peer, list[bytes]], list[tuple[Peer, list[bytes]]]], access: Access = OPEN_TO_ALL
    ) -> None:
        self.address, self._access = f"localhost:{free_ports(1)[0]}", access
        self.handled: dict[bytes, list[str]] = defaultdict(list)
        self.failed: list[BaseException] = []
        self.sent: list[Sent | None] = []
        self._answer, self._turn, self._over = answer, threading.Condition(), False
        self.listener = transports.listen(Listening(address=self.address, access=access, take=self._take))
        self.ways = {way.kind: way.where for way in self.listener.ways}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _take(self, peer: Peer, frames: list[Frame]) -> None:
        with self._turn:
            said = [bytes(f) for f in frames]
            self.handled[said[0]].append(threading.current_thread().name)
            for to, back in self._answer(peer, said):
                self.sent.append(self.listener.send(to, back))
            self._turn.notify_all()

    def wait_for(self, name: bytes) -> None:
        """Waits until a message with that header has been handled."""
        with self._turn:
            assert self._turn.wait_for(lambda: name in self.handled, WAIT_S)

    def nothing_is_being_sent(self) -> bool:
        """Whether all memory that was sent from is free again, within a while."""
        deadline = time.monotonic() + WAIT_S
        while busy := [sent for sent in self.sent if sent is not None and not sent.done]:
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

    def connect(self) -> Channel:
        return settle(EntryChannel(self.address, self._access))

    def raw(self) -> tuple[socket.socket, bytes]:
        """Returns a plain connection, and the greeting that is to be sent first."""
        return socket.create_connection(("127.0.0.1", int(self.address.rpartition(":")[2]))), OPEN

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


@pytest.fixture(params=[OPEN_TO_ALL, LOCKED], ids=["tcp", "tls"])
def each(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(echo, request.param)
    yield made
    made.close()


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("torchquorum-stream-")]


def gone(ended: list[threading.Thread]) -> bool:
    for thread in ended:
        thread.join(WAIT_S)
    return not any(t.is_alive() for t in ended)


def received(channel: Channel) -> list[bytes]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (found := channel.receive(0.1)) is not None:
            return [bytes(f) for f in found]
    raise AssertionError("no answer")


@pytest.mark.parametrize("size", [LARGE_BYTES - 1, LARGE_BYTES, 1_590_000, THREADED_BYTES[-1], THREADED_BYTES[-1] + 1])
def test_what_is_large_is_handled_on_the_connections_thread_and_all_else_where_it_is_polled(
    each: Host, size: int
) -> None:
    host = each
    channel, large = host.connect(), os.urandom(size)
    for name in (b"first", b"second"):
        channel.send([name, large, b"tail"])
        assert received(channel) == [name, large, b"tail"]
    threaded = size in THREADED_BYTES
    for name in (b"first", b"second"):
        assert [where == "torchquorum-stream-tcp/1" for where in host.handled[name]] == [threaded]
    assert len(threads()) == threaded
    channel.close()
    assert gone(threads())


def test_a_unix_stream_needs_no_thread(host: Host) -> None:
    channel, large = UNIX.connect("", host.ways["unix"], SYSTEM), os.urandom(LARGE)
    channel.send([b"large", large])
    assert received(channel) == [b"large", large] and threads() == []
    channel.close()


def test_many_connections_at_a_time_keep_their_messages_whole_and_in_order(each: Host) -> None:
    host = each
    failures: list[str] = []

    def work(number: int) -> None:
        channel = host.connect()
        for k in range(20):
            large = bytes([number, k]) * (LARGE + number)
            channel.send([f"{number} {k}".encode(), large])
            if received(channel) != [f"{number} {k}".encode(), large]:
                failures.append(f"{number} {k}")
        channel.close()

    workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert failures == [] and sum(map(len, host.handled.values())) == 120
    names = {name for names in host.handled.values() for name in names}
    assert names == {f"torchquorum-stream-tcp/{n}" for n in range(1, 7)}
    assert gone(threads())


def test_both_sides_may_send_more_than_the_sockets_hold_at_the_same_time(each: Host) -> None:
    host = each
    channel, large = host.connect(), os.urandom(THREADED_BYTES[-1])
    numbers = [str(k).encode() for k in range(4)]

    def send_all() -> None:
        for number in numbers:  # while answers to the first are on their way, and nobody reads them yet
            channel.send([number, large])

    sending = threading.Thread(target=send_all)
    sending.start()
    sending.join(WAIT_S)
    assert not sending.is_alive() and not channel.closed
    assert received(channel) == [b"0", large]  # later ones may be lost: it does not take what it asked for
    channel.close()
    assert gone(threads())


@pytest.mark.parametrize("end", ["closed in a frame", "reset", "no message", "hung up on"])
def test_whatever_ends_the_connection_ends_its_thread_and_frees_what_was_being_sent(host: Host, end: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    peer, token = host.raw()
    with peer:
        whole = struct.pack("<IQQ", 2, 5, LARGE) + b"first" + bytes(LARGE)
        peer.sendall(token + whole + struct.pack("<IQQ", 2, 5, LARGE) + b"again" + bytes(1000))
        host.wait_for(b"first")
        running = threads()
        assert list(host.handled) == [b"first"] and len(running) == 1
        if end == "reset":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif end == "no message":
            peer.sendall(bytes(LARGE - 1000) + struct.pack("<I", 99))
        elif end == "hung up on":
            host.listener.hang_up(FIRST)
        if end in ("no message", "hung up on"):
            peer.settimeout(WAIT_S)
            with suppress(ConnectionError):
                while peer.recv(1 << 20):
                    pass
    assert gone(running)
    host.sent.append(host.listener.send(FIRST, [b"late", bytes(LARGE)]))
    assert host.nothing_is_being_sent()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_peer_that_never_pauses_is_hung_up_on_all_the_same() -> None:
    def hang_up(peer: Peer, said: list[bytes]) -> list[tuple[Peer, list[bytes]]]:
        host.listener.hang_up(peer)
        return [(peer, [b"the last word"])]

    host = Host(hang_up)
    peer, token = host.raw()
    flood = struct.pack("<IQ", 1, 5) + b"again"
    with peer:
        large = struct.pack("<IQQ", 2, 5, LARGE) + b"first" + bytes(LARGE)
        peer.sendall(token + large + 5000 * flood)
        host.wait_for(b"first")
        assert gone(threads())
    host.close()
    assert {name: len(where) for name, where in host.handled.items()} == {b"first": 1}


def test_without_a_descriptor_for_a_thread_of_its_own_a_connection_works_as_well(host: Host) -> None:
    channel, large = host.connect(), os.urandom(LARGE)
    channel.send([b"small"])
    assert received(channel) == [b"small"]
    with no_file_left():
        channel.send([b"without", large])
        assert received(channel) == [b"without", large]
        assert threads() == []
    channel.send([b"with", large])
    assert received(channel) == [b"with", large] and len(threads()) == 1
    channel.close()
    assert gone(threads())


def test_answers_to_others_reach_them_from_a_connections_thread_by_whichever_transport_they_use() -> None:
    peers: dict[bytes, Peer] = {}

    def tell_all(peer: Peer, said: list[bytes]) -> list[tuple[Peer, list[bytes]]]:
        if said[0] != b"tell all":
            peers[said[0]] = peer
            return [(peer, [b"welcome"])]
        return [(to, [b"told", said[1]]) for to in peers.values()]

    host = Host(tell_all)
    large_tcp = host.connect()
    channels: dict[bytes, Channel] = {
        b"large tcp": large_tcp,
        b"small tcp": host.connect(),
        b"unix": UNIX.connect("", host.ways["unix"], SYSTEM),
        b"entry": EntryChannel(host.address),
    }
    for name, channel in channels.items():
        channel.send([name])
        assert received(channel) == [b"welcome"]
    large = os.urandom(LARGE)
    for _ in range(3):
        large_tcp.send([b"tell all", large])
        for channel in channels.values():
            assert received(channel) == [b"told", large]
    assert set(host.handled[b"tell all"]) == {"torchquorum-stream-tcp/1"}
    assert host.nothing_is_being_sent()
    for channel in channels.values():
        channel.close()
    host.close()
    assert gone(threads())


def test_what_was_answered_before_the_end_is_still_delivered() -> None:
    host = Host(echo)
    channel, large = host.connect(), os.urandom(LARGE)
    channel.send([b"once", large])
    assert received(channel) == [b"once", large]
    host.pause()
    for k in range(50):
        host.listener.send(FIRST, [str(k).encode()])
    host.close()
    assert [received(channel) for _ in range(50)] == [[str(k).encode()] for k in range(50)]
    assert channel.receive(WAIT_S) is None and channel.closed
    channel.close()
