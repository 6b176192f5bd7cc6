"""Who gets in at a listening socket: those with the secret, from wherever; without one, only this host."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq

from tests.ports import free_port
from tests.unit.wire.no_files import no_file_left
from torchquorum.cluster.secret import OPEN, Access, Secret
from torchquorum.errors import SecretError
from torchquorum.wire.descriptors import Reserve
from torchquorum.wire.zmq_access import NO_SECRET, TOO_MANY, UNFINISHED, AccessMonitor, ask_mechanism
from torchquorum.wire.zmq_channel import ZmqChannel
from torchquorum.wire.zmq_keys import derive_keys, lock_listener
from torchquorum.wire.zmq_listener import LARGE_AHEAD, ZmqListener

OURS = Access(secret=Secret("the-secret-of-this-cluster-0123456789abcdef"))
THEIRS = Access(secret=Secret("the-secret-of-another-one-0123456789abcdef"))
DEADLINE_S = 60.0


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(params=[OPEN, OURS], ids=["open", "locked"])
def access(request: pytest.FixtureRequest) -> Access:
    return request.param


@pytest.fixture
def listener(access: Access, address: str) -> Iterator[ZmqListener]:
    made = ZmqListener(address, access=access)
    yield made
    made.close()


def refused(address: str, access: Access) -> str:
    """Returns why a channel is not let in."""
    channel = ZmqChannel(address, b"x", access, "/job:ps/task:0")
    try:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            channel.send([b"hello"])
            try:
                assert channel.receive(0.1) is None
            except SecretError as error:
                return str(error)
        raise AssertionError("was neither let in nor told why")
    finally:
        channel.close()


def talk(listener: ZmqListener, channel: ZmqChannel) -> list[bytes]:
    """Sends a ping, sees that it comes whole, and answers; returns what the channel hears."""
    channel.send([b"ping", b"x" * 200_000])
    received = None
    deadline = time.monotonic() + DEADLINE_S
    while received is None and time.monotonic() < deadline:
        received = listener.receive(0.1)
    assert received is not None and bytes(received[1][0]) == b"ping" and len(received[1][1]) == 200_000
    listener.send(received[0], [b"pong"])
    return [bytes(frame) for frame in channel.receive(DEADLINE_S) or []]


def test_who_has_the_secret_gets_in_and_others_are_told_and_counted(address: str) -> None:
    listener, channel = ZmqListener(address, access=OURS), ZmqChannel(address, b"w", OURS)
    try:
        assert talk(listener, channel) == [b"pong"]
        assert "does not accept this task's secret" in (wrong := refused(address, THEIRS))
        assert f"/job:ps/task:0 ({address})" in wrong and "--secret-file" in wrong
        assert "this task was given none" in (missing := refused(address, OPEN)) and "--secret-file" in missing
        until(lambda: listener.turned_away.get("wrong secret", 0) > 0)
        # Who comes without one may see by himself that he is not wanted, and go before he is judged.
        until(lambda: any(listener.turned_away.get(why, 0) > 0 for why in (NO_SECRET, UNFINISHED)))
        assert listener.receive(0.0) is None  # nothing of what they said came through
        assert talk(listener, channel) == [b"pong"]
    finally:
        channel.close()
        listener.close()


def test_who_has_a_secret_does_not_talk_to_a_task_without_one(address: str) -> None:
    listener = ZmqListener(address)
    try:
        assert "runs without a secret" in refused(address, OURS)
        until(lambda: sum(listener.turned_away.values()) > 0)
    finally:
        listener.close()


def test_who_knows_the_servers_public_key_but_not_the_secret_is_refused(address: str) -> None:
    """The key of the listening side is not enough: the other side's must be the one made from the secret, too."""
    listener = ZmqListener(address, access=OURS)
    assert OURS.secret is not None
    public, private = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
        thief.setsockopt(zmq.LINGER, 0)
        thief.setsockopt(zmq.CURVE_SERVERKEY, derive_keys(OURS.secret)[0].public)
        thief.setsockopt(zmq.CURVE_PUBLICKEY, public)
        thief.setsockopt(zmq.CURVE_SECRETKEY, private)
        thief.connect(f"tcp://{address}")
        thief.send(b"let me in")
        until(lambda: listener.turned_away.get("wrong secret", 0) > 0)
        assert listener.receive(0.2) is None
    listener.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org", "10.1.2.3", "[2001:db8::1]", "*"])
def test_an_address_for_other_hosts_needs_a_secret_or_a_word(host: str) -> None:
    with pytest.raises(SecretError) as raised:
        ZmqListener(f"{host}:2222")
    for words in ("without a secret", "torchquorum secret --out", "--secret-file", "--insecure"):
        assert words in str(raised.value)


@pytest.mark.parametrize("access", [OURS, Access(insecure=True)], ids=["secret", "insecure"])
def test_an_address_for_other_hosts_is_served_with_a_secret_or_the_word(address: str, access: Access) -> None:
    port = address.rpartition(":")[2]
    listener = ZmqListener(f"some-name:{port}", access=access)
    channel = ZmqChannel(address, b"w", access)
    try:
        assert talk(listener, channel) == [b"pong"]
    finally:
        channel.close()
        listener.close()


def test_a_socket_of_the_launcher_is_judged_by_where_it_is_bound() -> None:
    with socket.socket() as made:
        made.bind(("0.0.0.0", 0))
        made.listen()
        with pytest.raises(SecretError, match="without a secret"):
            ZmqListener(f"localhost:{made.getsockname()[1]}", made.fileno())


def test_garbage_and_half_greetings_are_counted_and_harm_nobody(
    listener: ZmqListener, address: str, access: Access
) -> None:
    host, _, port = address.rpartition(":")
    half = socket.create_connection((host, int(port)))
    half.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f")  # the signature of a greeting, and then silence
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\0" * 100):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(garbage)
    until(lambda: sum(listener.turned_away.values()) >= 2)
    channel = ZmqChannel(address, b"w", access)
    assert talk(listener, channel) == [b"pong"]
    channel.close()
    half.close()


def test_beyond_the_most_connections_newcomers_are_hung_up_on() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        said: list[str] = []
        monitor = AccessMonitor(router, None, said.append, most=5)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        guests = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        until(lambda: monitor.counts().get(TOO_MANY, 0) == 3)
        for late in guests[5:]:
            late.settimeout(DEADLINE_S)
            while late.recv(100):
                pass  # our greeting may have come; then the end
        until(lambda: len(said) == 1)
        assert said[0].startswith("turned a connection away: too many connections, from 127.0.0.1")
        for guest in guests:
            guest.close()
        router.monitor(None, 0)
        monitor.close()


def test_who_does_not_read_loses_what_does_not_fit(listener: ZmqListener, address: str, access: Access) -> None:
    channel = ZmqChannel(address, b"slow", access)
    channel.socket.setsockopt(zmq.RCVHWM, 1)
    assert talk(listener, channel) == [b"pong"]
    large = bytes(8 << 20)
    sent = [listener.send(b"slow", [b"", large]) for _ in range(40)]
    assert sum(s is not None and not s.done for s in sent) <= LARGE_AHEAD + 1  # under way, and one that is put off

    def is_given_up() -> bool:
        listener.receive(0.05)
        return sum(s is not None and not s.done for s in sent) <= LARGE_AHEAD

    until(is_given_up)
    channel.close()


def test_a_peer_that_talks_too_much_loses_its_connection_and_not_its_place(
    listener: ZmqListener, address: str, access: Access
) -> None:
    channel = ZmqChannel(address, b"loud", access)
    assert talk(listener, channel) == [b"pong"]

    def is_cut() -> bool:
        listener.hang_up(b"loud")  # with the next that it says, if the monitor has heard by then that it has come
        channel.send([b"more"])
        listener.receive(0.05)
        return listener.turned_away.get("talks too much", 0) == 1

    numbers = itertools.count()

    def is_heard() -> bool:
        """Whether what was said last is heard: what is under way when the connection is cut is lost."""
        last = b"%d" % next(numbers)
        channel.send([last])
        while (received := listener.receive(0.05)) is not None:
            if received[1][0] == last:
                return True
        return False

    until(is_cut)
    until(is_heard)
    assert talk(listener, channel) == [b"pong"]  # ZeroMQ comes back by itself
    channel.close()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3], ids=["nothing", "something else"])
def test_what_is_not_zeromq_has_no_mechanism(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            with other.accept()[0] as asking:
                asking.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask_mechanism(f"tcp://127.0.0.1:{port}", DEADLINE_S) == ""
        thread.join(DEADLINE_S)
    assert ask_mechanism(f"tcp://127.0.0.1:{port}") == ""  # now nobody is there


@pytest.mark.parametrize(("access", "mechanism"), [(OPEN, "NULL"), (OURS, "CURVE")])
def test_a_task_says_of_its_socket_whether_it_wants_a_secret(address: str, access: Access, mechanism: str) -> None:
    listener = ZmqListener(address, access=access)
    assert ask_mechanism(f"tcp://{address}", DEADLINE_S) == mechanism
    listener.close()


def test_a_message_that_names_no_connection_ends_none() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        monitor = AccessMonitor(router, None, lambda _: None)
        monitor.hang_up(-1)
        monitor.hang_up("no number")
        assert monitor.counts() == {}
        router.monitor(None, 0)
        monitor.close()


def test_a_task_that_does_not_accept_our_key_is_named(address: str) -> None:
    """Whoever listens there knows the secret, and yet refuses this one key."""
    assert OURS.secret is not None
    with zmq.Context() as context, context.socket(zmq.REP) as judge, context.socket(zmq.ROUTER) as router:
        judge.bind("inproc://zeromq.zap.01")
        router.setsockopt(zmq.ZAP_DOMAIN, b"torchquorum")
        router.setsockopt(zmq.LINGER, 0)
        lock_listener(router, OURS.secret)
        router.bind(f"tcp://{address}")
        ended = threading.Event()

        def refuse() -> None:
            while not ended.is_set():
                if judge.poll(20):
                    version, request, *_ = judge.recv_multipart()
                    judge.send_multipart([version, request, b"400", b"no", b"", b""])

        thread = threading.Thread(target=refuse)
        thread.start()
        try:
            assert "does not accept this task's secret: it knows another one" in refused(address, OURS)
        finally:
            ended.set()
            thread.join(DEADLINE_S)


def test_what_answers_like_zeromq_and_is_no_task_is_named() -> None:
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1" + b"NULL".ljust(20, b"\0") + bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(DEADLINE_S)
        ended = threading.Event()

        def answer() -> None:
            with other.accept()[0] as asking:
                asking.sendall(greeting + b"\4\6\5HELLO")  # a command that nobody may begin with
                ended.wait(DEADLINE_S)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            assert "/job:ps/task:0" in (why := refused(f"127.0.0.1:{other.getsockname()[1]}", OPEN))
            assert "torchquorum" in why
        finally:
            ended.set()
            thread.join(DEADLINE_S)


def test_keys_do_not_show_themselves() -> None:
    assert OURS.secret is not None
    assert {repr(pair) for pair in derive_keys(OURS.secret)} == {"KeyPair(hidden)"}


def test_a_channel_that_zeromq_has_given_up_does_not_block() -> None:
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1" + b"NULL".ljust(20, b"\0") + bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as other:
        channel = ZmqChannel(f"127.0.0.1:{other.getsockname()[1]}", b"x", OPEN, "/job:ps/task:0")
        with other.accept()[0] as asking:
            asking.sendall(greeting + b"\4\6\5HELLO")
            with pytest.raises(SecretError):
                until(lambda: channel.receive(0.05) is not None)
            sender = threading.Thread(target=lambda: [channel.send([b"hello"]) for _ in range(100)])
            sender.start()
            sender.join(DEADLINE_S)
            assert not sender.is_alive()
        channel.close()


def test_no_file_left_costs_newcomers_their_connection_and_nobody_stays_awake_for_them(address: str) -> None:
    listener, channel = ZmqListener(address), ZmqChannel(address, b"w")
    host, port = address.split(":")
    try:
        assert talk(listener, channel) == [b"pong"]
        waiting = [socket.socket() for _ in range(5)]
        with no_file_left():
            for stranger in waiting:
                stranger.settimeout(DEADLINE_S)
                stranger.connect((host, int(port)))
            for stranger in waiting:
                with suppress(ConnectionError):
                    assert stranger.recv(100)[:1] in (b"", b"\xff")  # the beginning of a greeting, perhaps
            assert talk(listener, channel) == [b"pong"]  # who is in is served
        for stranger in waiting:
            stranger.close()
        until(lambda: listener.turned_away.get(TOO_MANY, 0) > 0)
        other = ZmqChannel(address, b"x")
        assert talk(listener, other) == [b"pong"]  # with files again, newcomers are
        other.close()
        assert listener.turned_away[TOO_MANY] <= 5  # ZeroMQ did not try, and fail, a thousand times
    finally:
        channel.close()
        listener.close()


def test_with_descriptors_again_the_very_first_connection_is_accepted() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        reserve, slow = Reserve(), int(DEADLINE_S * 1000)  # nothing is done beside what happens
        monitor = AccessMonitor(router, None, lambda _: None, reserve=reserve, poll_ms=slow)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        reserve.give()  # as for a connection for which there was none; by now there are enough
        with socket.create_connection(("127.0.0.1", port)):
            until(lambda: reserve.held or bool(monitor.counts()))
        router.monitor(None, 0)
        monitor.close()
        assert TOO_MANY not in monitor.counts()
