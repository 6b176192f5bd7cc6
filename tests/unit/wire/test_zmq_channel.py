"""ZeroMQ over real loopback sockets."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import zmq

from tests.ports import free_port
from tests.unit.wire.no_files import no_file_left
from torchquorum.cluster.secret import OPEN, Access, Secret
from torchquorum.errors import AddressInUseError, ClusterError
from torchquorum.wire.address import endpoint
from torchquorum.wire.channel import Sent
from torchquorum.wire.inprocess import InProcessNetwork
from torchquorum.wire.zmq_channel import COPY_BELOW_BYTES, ZmqChannel
from torchquorum.wire.zmq_listener import LISTENER_FILES, MOST_UNWANTED, ZmqListener

WAIT_S = 10.0
LOCKED = Access(secret=Secret("the-secret-of-this-cluster-0123456789abcdef"))


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


HOSTS = ["localhost", "127.0.0.1", pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))]
Pair = tuple[ZmqListener, ZmqChannel]


@pytest.fixture
def connect() -> Iterator[Callable[[str], Pair]]:
    made: list[ZmqListener | ZmqChannel] = []

    def make(host: str) -> Pair:
        address = f"{host}:{free_port()}"
        listener = ZmqListener(address)
        made.append(listener)
        channel = ZmqChannel(address, b"worker/0")
        made.append(channel)
        return listener, channel

    yield make
    for end in made:
        end.close()


@pytest.mark.parametrize("host", HOSTS)
def test_a_message_goes_there_and_its_answer_comes_back(host: str, connect: Callable[[str], Pair]) -> None:
    listener, channel = connect(host)
    channel.send([b"header", b"tensor"])
    received = listener.receive(WAIT_S)
    assert received is not None
    peer, frames = received
    assert peer == b"worker/0" and [bytes(f) for f in frames] == [b"header", b"tensor"]
    assert listener.send(peer, [b"answer"]) is None
    answer = channel.receive(WAIT_S)
    assert answer is not None and [bytes(f) for f in answer] == [b"answer"]


def test_large_frames_are_sent_without_a_copy_and_the_handle_says_when_they_are_free(
    connect: Callable[[str], Pair],
) -> None:
    listener, channel = connect("localhost")
    large = bytearray(os.urandom(8 << 20))
    channel.send([b"header", memoryview(large)])
    received = listener.receive(WAIT_S)
    assert received is not None
    assert bytes(received[1][1]) == bytes(large)
    sent = listener.send(received[0], [b"header", memoryview(large)])
    assert sent is not None
    answer = channel.receive(WAIT_S)
    assert answer is not None and bytes(answer[1]) == bytes(large)
    sent.wait(WAIT_S)  # pyright: ignore[reportAttributeAccessIssue]
    assert sent.done


class _Kept(bytearray):
    """Memory that whoever frees it has to wait for."""

    freeing: threading.Event
    let_go: threading.Event

    def __del__(self) -> None:
        self.freeing.set()
        self.let_go.wait(WAIT_S)


@contextmanager
def _late_to_tell() -> Iterator[None]:
    """Within, pyzmq's thread that tells which messages have left is busy with one that never will."""
    freeing, let_go = threading.Event(), threading.Event()
    unsent = zmq.Context.instance().socket(zmq.PUSH)
    unsent.connect(f"tcp://127.0.0.1:{free_port()}")
    kept = _Kept(COPY_BELOW_BYTES)
    kept.freeing, kept.let_go = freeing, let_go
    unsent.send(kept, copy=False, track=True)
    del kept
    unsent.close(0)
    assert freeing.wait(WAIT_S)
    try:
        yield
    finally:
        let_go.set()


def _introduced(listener: ZmqListener, channel: ZmqChannel) -> bytes:
    channel.send([b"hello"])
    received = listener.receive(WAIT_S)
    assert received is not None
    return received[0]


def test_a_large_answer_is_not_lost_when_the_thread_that_tells_that_others_were_taken_is_late(
    connect: Callable[[str], Pair],
) -> None:
    listener, channel = connect("localhost")
    peer = _introduced(listener, channel)
    with _late_to_tell():
        for number in (b"0", b"1"):
            assert listener.send(peer, [number, bytes(COPY_BELOW_BYTES)]) is not None
            answer = channel.receive(WAIT_S)
            assert answer is not None and answer[0] == number
        last = listener.send(peer, [b"2", bytes(COPY_BELOW_BYTES)])
        assert last is not None and not last.done
        assert listener.receive(0.05) is None and channel.receive(0.0) is None, "all was told at once"
    deadline = time.monotonic() + WAIT_S
    while (answer := channel.receive(0.0)) is None and time.monotonic() < deadline:
        listener.receive(0.01)
    assert answer is not None and answer[0] == b"2"
    while not last.done and time.monotonic() < deadline:
        time.sleep(0.001)  # nobody tells
    assert last.done


def test_a_peer_that_takes_nothing_loses_what_was_put_off_and_gets_the_rest_whole(
    connect: Callable[[str], Pair],
) -> None:
    listener, channel = connect("localhost")
    channel.socket.setsockopt(zmq.RCVHWM, 1)
    where = endpoint(channel.address)
    channel.socket.disconnect(where)
    channel.socket.connect(where)  # ZeroMQ reads no further ahead now
    peer, large = _introduced(listener, channel), os.urandom(8 << 20)
    ways: list[Sent] = []
    while len(ways) < 20 and (way := listener.send(peer, [large])) is not None:
        ways.append(way)
        for _ in range(10):
            listener.receive(0.01)
    assert len(ways) < 20, "nothing is ever lost"
    put_off, deadline = ways[-1], time.monotonic() + WAIT_S
    assert not put_off.done
    while not put_off.done and time.monotonic() < deadline:
        assert listener.receive(0.05) is None
    assert put_off.done
    got: list[list[bytes]] = []
    while not all(way.done for way in ways) and time.monotonic() < deadline:
        message = channel.receive(0.01)
        got += [[bytes(f) for f in message]] if message is not None else []
    assert listener.send(peer, [b"again", large]) is not None
    while (message := channel.receive(WAIT_S)) is not None and message[0] != b"again":
        got.append([bytes(f) for f in message])
    assert message is not None
    assert 0 < len(got) < len(ways) and all(each == [large] for each in got)


def test_what_was_put_off_is_sent_when_the_listener_closes() -> None:
    address = f"localhost:{free_port()}"
    listener, channel = ZmqListener(address), ZmqChannel(address, b"worker/0")
    peer = _introduced(listener, channel)
    with _late_to_tell(), closing(channel):
        for number in (b"0", b"1", b"2"):
            assert listener.send(peer, [number, bytes(COPY_BELOW_BYTES)]) is not None
        listener.close()
        for number in (b"0", b"1", b"2"):
            answer = channel.receive(WAIT_S)
            assert answer is not None and answer[0] == number


def test_small_frames_are_free_at_once(connect: Callable[[str], Pair]) -> None:
    listener, channel = connect("localhost")
    small = bytearray(b"a" * (COPY_BELOW_BYTES - 1))
    channel.send([small])
    small[:] = b"b" * len(small)
    received = listener.receive(WAIT_S)
    assert received is not None and set(bytes(received[1][0])) == set(b"a")


def test_receive_gives_up_when_its_time_is_over(connect: Callable[[str], Pair]) -> None:
    for end in connect("localhost"):
        assert end.receive(0.0) is None
        started = time.monotonic()
        assert end.receive(0.05) is None
        assert 0.04 < time.monotonic() - started < 5


def test_wait_returns_as_soon_as_something_has_come_here_or_there(connect: Callable[[str], Pair]) -> None:
    listener, channel = connect("localhost")
    other_listener, other = connect("localhost")
    listener.wait([other], 0.02)
    channel.send([b"x"])
    started = time.monotonic()
    listener.wait([other], WAIT_S)
    received = listener.receive(0.0)
    assert received is not None
    other.send([b"hello"])
    heard = other_listener.receive(WAIT_S)
    assert heard is not None
    other_listener.send(heard[0], [b"there"])
    listener.wait([other], WAIT_S)
    assert other.receive(0.0) is not None
    assert time.monotonic() - started < WAIT_S


def test_an_answer_to_a_peer_that_is_gone_is_no_error(connect: Callable[[str], Pair]) -> None:
    listener, _ = connect("localhost")
    assert listener.send(b"nobody", [b"x"]) is None
    listener.send(b"nobody", [bytes(COPY_BELOW_BYTES)])


def test_a_listener_may_come_after_its_first_caller() -> None:
    address = f"localhost:{free_port()}"
    channel = ZmqChannel(address, b"early")
    channel.send([b"x"])
    listener = ZmqListener(address)
    try:
        received = listener.receive(WAIT_S)
        assert received is not None and received[0] == b"early"
    finally:
        channel.close()
        listener.close()


def test_a_port_in_use_is_an_error_that_names_the_address_and_who_holds_it(connect: Callable[[str], Pair]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"localhost:{holder.getsockname()[1]}"
        with pytest.raises(AddressInUseError) as raised:
            ZmqListener(address)
    assert f"cannot listen on {address}" in str(raised.value)
    assert f"process {os.getpid()} (" in str(raised.value)
    assert "--ps_hosts" in str(raised.value)


def test_a_port_that_is_given_up_within_a_moment_is_taken() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        timer = threading.Timer(0.3, holder.close)
        timer.start()
        listener = ZmqListener(f"localhost:{port}")
        timer.join()
        assert holder.fileno() == -1
    channel = ZmqChannel(f"localhost:{port}", b"x")
    try:
        channel.send([b"hello"])
        received = listener.receive(WAIT_S)
        assert received is not None and [bytes(f) for f in received[1]] == [b"hello"]
    finally:
        channel.close()
        listener.close()


def test_a_listening_socket_of_the_launcher_is_taken_over() -> None:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        address = f"localhost:{made.getsockname()[1]}"
        listener = ZmqListener(address, os.dup(made.fileno()))
    channel = ZmqChannel(address, b"x")
    try:
        channel.send([b"hello"])
        assert listener.receive(WAIT_S) is not None
    finally:
        channel.close()
        listener.close()


def test_a_channel_to_a_host_that_does_not_exist_leaves_nothing_behind() -> None:
    with pytest.raises(ClusterError, match="'no-such-host.invalid' .* cannot be found"):
        ZmqChannel("no-such-host.invalid:1", b"x")


@pytest.mark.parametrize("port", ["nowhere", "99999", "65536", "-1", "", "2222 ", "\u0664\u0665", "1" * 5000])
def test_a_port_that_is_none_is_named(port: str) -> None:
    with pytest.raises(ClusterError, match=f"cannot listen on localhost:{port}: .*must be a number up to 65535"):
        ZmqListener(f"localhost:{port}")


def test_an_address_that_is_not_of_this_host_is_named() -> None:
    with pytest.raises(ClusterError, match=r"cannot listen on \[::1%nowhere\]:2222: .*is that an address of this host"):
        ZmqListener("[::1%nowhere]:2222")


@pytest.mark.parametrize("files", [0, 5])
@pytest.mark.parametrize("access", [OPEN, LOCKED], ids=["open", "locked"])
def test_no_file_left_to_listen_with_is_an_error_that_says_where_to_look(access: Access, files: int) -> None:
    address = f"127.0.0.1:{free_port()}"
    with closing(ZmqListener(address)):
        pass  # all that ZeroMQ needs for itself is there
    why = rf"cannot listen on {address}: Too many open files; see ulimit -n"
    with no_file_left(but=files), pytest.raises(ClusterError, match=why):
        ZmqListener(address, access=access)
    with no_file_left(but=LISTENER_FILES + 4):
        ZmqListener(address, access=access).close()


@pytest.mark.parametrize("files", [0, 1, 2])
def test_no_file_left_for_a_connection_is_an_error_that_says_where_to_look(
    connect: Callable[[str], Pair], files: int
) -> None:
    listener, channel = connect("127.0.0.1")  # all that ZeroMQ needs for itself is there
    channel.send([b"hello"])
    assert listener.receive(WAIT_S) is not None
    with (
        no_file_left(but=files),
        pytest.raises(ClusterError, match=r"no connection to the task \(127.0.0.1:1\): Too many .*see ulimit -n"),
    ):
        ZmqChannel("127.0.0.1:1", b"x")


def test_a_thousand_unwanted_peers_are_all_that_is_kept() -> None:
    listener = ZmqListener(f"localhost:{free_port()}")
    for number in range(1500):
        listener.hang_up(b"%d" % number)
    assert len(listener.unwanted) == MOST_UNWANTED
    listener.wait([InProcessNetwork().connect("nowhere:1", b"x")], 0.0)  # a channel that ZeroMQ cannot watch
    listener.close()
    assert listener.turned_away == {}
    listener.close()
