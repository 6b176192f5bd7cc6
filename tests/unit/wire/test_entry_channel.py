"""A channel that connects by itself: before its task is there, when it comes back, and what is said when it will never let us in."""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from tests.ports import free_port
from tests.unit.wire.no_files import no_file_left
from tests.unit.wire.streams import LOCKED, WAIT_S, hangs_up, until
from torchquorum.cluster.secret import OPEN, Access, Secret
from torchquorum.errors import ClusterError, SecretError, TorchQuorumError
from torchquorum.wire.channel import Listener
from torchquorum.wire.entry_channel import MOST_KEPT, EntryChannel
from torchquorum.wire.opening import OPEN as GREETING
from torchquorum.wire.refusals import NO_SECRET, TALKS_TOO_MUCH, UNEXPECTED_SECRET, UNFINISHED, WRONG_SECRET
from torchquorum.wire.stream_channel import StreamChannel
from torchquorum.wire.transport import Listening
from torchquorum.wire.transports import listen_at_entry

THEIRS = Access(secret=Secret("the-secret-of-another-one-0123456789abcdef"))
LARGE = 200_000


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


HOSTS = ["localhost", "127.0.0.1", pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))]


class Both:
    """A task that listens and a channel to it, pumped by the test."""

    def __init__(self, access: Access = OPEN, host: str = "127.0.0.1") -> None:
        self.address, self.access = f"{host}:{free_port()}", access
        self.listener: Listener | None = None
        self.channels: list[EntryChannel] = []

    def listen(self) -> Listener:
        self.listener = listen_at_entry(Listening(address=self.address, access=self.access))
        return self.listener

    def connect(self, access: Access | None = None, silence_s: float | None = None) -> EntryChannel:
        made = EntryChannel(self.address, access or self.access, "/job:ps/task:0", silence_s=silence_s)
        self.channels.append(made)
        return self.channels[-1]

    def heard(self, channel: EntryChannel) -> tuple[bytes, list[bytes]]:
        """Returns what the task hears, while the channel goes on."""
        found: list[tuple[bytes, list[bytes]]] = []

        def comes() -> bool:
            assert self.listener is not None
            if (message := self.listener.receive(0.005)) is not None:
                found.append((message[0], [bytes(f) for f in message[1]]))
            elif not found:
                assert channel.receive(0.0) is None
            return bool(found)

        until(comes)
        return found[0]

    def answer(self, channel: EntryChannel) -> list[bytes]:
        """Returns what the channel hears, while the task goes on."""
        found: list[list[bytes]] = []

        def comes() -> bool:
            if (message := channel.receive(0.005)) is not None:
                found.append([bytes(f) for f in message])
            elif self.listener is not None:
                assert self.listener.receive(0.0) is None
            return bool(found)

        until(comes)
        return found[0]

    def talk(self, channel: EntryChannel) -> None:
        """A message with a large frame gets through, and its answer back."""
        large = os.urandom(LARGE)
        channel.send([b"ping"])
        self.heard(channel)
        channel.send([b"large", large])
        peer, said = self.heard(channel)
        assert said == [b"large", large]
        assert self.listener is not None
        self.listener.send(peer, [b"pong", large])
        assert self.answer(channel) == [b"pong", large]

    def why_not(self, channel: EntryChannel) -> TorchQuorumError:
        """Returns why a channel is not let in."""
        found: list[TorchQuorumError] = []

        def fails() -> bool:
            channel.send([b"hello"])
            if self.listener is not None:
                assert self.listener.receive(0.0) is None
            try:
                assert channel.receive(0.01) is None
            except TorchQuorumError as error:
                found.append(error)
            return bool(found)

        until(fails)
        return found[0]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        if self.listener is not None:
            self.listener.close()


@pytest.fixture(params=[OPEN, LOCKED], ids=["tcp", "tls"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(request.param)
    yield made
    made.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Both]]:
    made: list[Both] = []

    def both(access: Access = OPEN, host: str = "127.0.0.1") -> Both:
        made.append(Both(access, host))
        return made[-1]

    yield both
    for each in made:
        each.close()


@pytest.mark.parametrize("host", HOSTS)
def test_messages_go_there_and_answers_come_back(make: Callable[..., Both], host: str) -> None:
    both = make(host=host)
    both.listen()
    channel = both.connect()
    both.talk(channel)
    assert channel.is_connected and not channel.closed


def test_a_task_may_come_after_its_first_caller_and_hears_once_what_was_said_before(both: Both) -> None:
    channel = both.connect()
    for _ in range(5):
        channel.send([b"hello"])
        assert channel.receive(0.01) is None
    listener = both.listen()
    assert both.heard(channel)[1] == [b"hello"]
    assert listener.receive(0.05) is None
    both.talk(channel)


def test_what_is_kept_for_a_task_that_is_not_there_is_bounded(both: Both) -> None:
    channel = both.connect()
    for k in range(3 * MOST_KEPT):
        channel.send([b"%d" % k])
    channel.send([b"large", bytes(1 << 20)])
    both.listen()
    assert [both.heard(channel)[1] for _ in range(MOST_KEPT)] == [
        [b"%d" % k] for k in range(2 * MOST_KEPT, 3 * MOST_KEPT)
    ]


def test_a_task_that_is_restarted_is_reached_again_by_the_same_channel_and_descriptor(both: Both) -> None:
    both.listen().close()
    channel = both.connect()
    fd = channel.fileno()
    for _ in range(2):
        listener = both.listen()
        both.talk(channel)
        listener.close()
        until(lambda: channel.receive(0.01) is None and not channel.is_connected)
        assert channel.fileno() == fd and not channel.closed
    both.listen()
    both.talk(channel)


def test_a_connection_on_which_nothing_is_answered_any_more_is_made_anew_and_one_that_answers_stays(both: Both) -> None:
    listener, channel = both.listen(), both.connect(silence_s=0.3)
    peers: list[bytes] = []

    def ask(*, answered: bool) -> None:
        channel.send([b"hello"])
        if (message := listener.receive(0.01)) is not None:
            peers.append(message[0])
            if answered:
                listener.send(message[0], [b"here"])
        channel.receive(0.01)

    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        ask(answered=True)
    assert len(set(peers)) == 1
    until(lambda: ask(answered=False) or len(set(peers)) > 1)  # as on a connection that a cut has broken
    until(lambda: listener.receive(0.05) is None)
    both.talk(channel)


def test_a_peer_that_is_hung_up_on_may_come_again(both: Both) -> None:
    listener, channel = both.listen(), both.connect()
    channel.send([b"hello"])
    listener.hang_up(both.heard(channel)[0])
    until(lambda: channel.receive(0.01) is None and not channel.is_connected)
    both.talk(channel)
    assert listener.turned_away == {TALKS_TOO_MUCH: 1}


def test_a_settled_channel_says_when_its_connection_is_lost_and_makes_no_other(both: Both) -> None:
    listener, channel = both.listen(), both.connect()
    both.talk(channel)
    before = len(os.listdir("/proc/self/fd"))
    settled = channel.settled()
    assert isinstance(settled, StreamChannel) and len(os.listdir("/proc/self/fd")) == before - 1
    settled.send([b"hello"])
    until(lambda: (message := listener.receive(0.01)) is not None and message[1] == [b"hello"])
    listener.close()
    until(lambda: settled.receive(0.01) is None and settled.closed)
    settled.close()
    both.listener = None


def test_a_channel_whose_connection_is_lost_just_then_is_settled_as_closed(both: Both) -> None:
    settled = both.connect().settled()
    assert settled.closed and settled.receive(0.0) is None
    settled.close()


def test_receive_gives_up_when_its_time_is_over_whether_somebody_is_there_or_not(both: Both) -> None:
    channel = both.connect()
    for _ in range(2):
        assert channel.receive(0.0) is None
        started = time.monotonic()
        assert channel.receive(0.05) is None
        assert 0.04 < time.monotonic() - started < 5
        if both.listener is None:
            both.listen()
            both.talk(channel)


def test_a_task_that_takes_its_time_to_accept_is_waited_for_without_a_busy_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = EntryChannel(f"127.0.0.1:{silent.getsockname()[1]}")
        assert channel.receive(0.05) is None
        started = time.process_time()
        assert channel.receive(0.5) is None
        assert time.process_time() - started < 0.2
        channel.close()


def test_large_frames_stay_as_they_are_as_long_as_somebody_uses_them(both: Both) -> None:
    listener, channel = both.listen(), both.connect()
    channel.send([b"hello"])
    peer, _ = both.heard(channel)
    held = []
    for k in range(5):
        listener.send(peer, [bytes([k]) * LARGE, bytes([k]) * LARGE])
        until(
            lambda: listener.receive(0.0) is None and (held.append(channel.receive(0.01)) or held[-1] or not held.pop)
        )
    whole = [message for message in held if message is not None]
    assert [set(bytes(frame)) for message in whole for frame in message] == [{k} for k in range(5) for _ in range(2)]


# -- who is not let in ----------------------------------------------------------------------------------------------------


def test_who_has_the_secret_gets_in_and_others_are_told_and_counted(make: Callable[..., Both]) -> None:
    both = make(LOCKED)
    listener, channel = both.listen(), both.connect()
    both.talk(channel)
    wrong = both.why_not(both.connect(THEIRS))
    assert isinstance(wrong, SecretError) and "does not accept this task's secret" in str(wrong)
    assert f"/job:ps/task:0 ({both.address})" in str(wrong) and "--secret-file" in str(wrong)
    missing = both.why_not(both.connect(OPEN))
    assert isinstance(missing, SecretError) and "this task was given none" in str(missing)
    until(lambda: listener.receive(0.01) is None and {WRONG_SECRET, NO_SECRET} <= listener.turned_away.keys())
    both.talk(channel)


def test_who_has_a_secret_does_not_talk_to_a_task_without_one(make: Callable[..., Both]) -> None:
    both = make(OPEN)
    listener = both.listen()
    error = both.why_not(both.connect(LOCKED))
    assert isinstance(error, SecretError) and "runs without a secret" in str(error)
    until(lambda: listener.receive(0.01) is None and UNEXPECTED_SECRET in listener.turned_away)


@pytest.mark.parametrize("access", [OPEN, LOCKED], ids=["tcp", "tls"])
@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"\xff" + struct.pack(">QB", 1, 0x7F) + b"\3\0NULL", "speaks ZeroMQ, as torchquorum did before protocol"),
        (GREETING.replace(b"/2", b"/3"), "another version"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a task of torchquorum"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is not a task of torchquorum"),
    ],
)
def test_what_is_at_the_address_and_cannot_be_talked_to_is_named(access: Access, said: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        channel = EntryChannel(f"127.0.0.1:{other.getsockname()[1]}", access, "/job:ps/task:0")
        assert channel.receive(0.01) is None
        with other.accept()[0] as accepted:
            accepted.sendall(said)
            with pytest.raises(ClusterError, match=words):
                channel.receive(WAIT_S)
        channel.close()


def test_a_task_that_hangs_up_without_a_word_may_be_ending_and_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        channel = EntryChannel(f"127.0.0.1:{other.getsockname()[1]}")
        for _ in range(3):
            assert channel.receive(0.01) is None
            other.settimeout(WAIT_S)
            other.accept()[0].close()
            until(lambda: channel.receive(0.01) is None and channel.may_wait_s() < 1.0)
            until(lambda: channel.receive(0.01) is None and channel.may_wait_s() > 1.0)
        channel.close()


def test_who_knows_the_listening_sides_certificate_but_not_the_secret_is_refused(make: Callable[..., Both]) -> None:
    """The certificate is shown to whoever connects: it opens nothing."""
    import ssl

    both = make(LOCKED)
    listener = both.listen()
    host, _, port = both.address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    with socket.create_connection((host, int(port))) as thief:
        thief.settimeout(0.01)

        def is_turned_away() -> bool:
            try:
                tls.do_handshake()
                tls.write(b"let me in")
            except (ssl.SSLWantReadError, ssl.SSLError):
                pass
            try:
                if outgoing.pending:
                    thief.sendall(outgoing.read())
                assert listener.receive(0.01) is None
                incoming.write(thief.recv(1 << 16))
            except OSError:
                pass
            return bool(listener.turned_away)

        until(is_turned_away)
        assert hangs_up(thief)
    assert listener.turned_away == {NO_SECRET: 1} and tls.getpeercert(binary_form=True)


def test_who_hangs_up_in_the_handshake_is_counted(make: Callable[..., Both]) -> None:
    both = make(LOCKED)
    listener = both.listen()
    channel = both.connect()
    channel.close()
    until(lambda: listener.receive(0.01) is None and listener.turned_away)
    assert listener.turned_away == {UNFINISHED: 1}


def test_a_host_that_does_not_exist_is_named_and_leaves_nothing_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ClusterError, match="'no-such-host.invalid' .* cannot be found"):
        EntryChannel("no-such-host.invalid:1")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("files", [0, 1])
def test_no_file_left_for_a_connection_is_an_error_that_says_where_to_look(files: int) -> None:
    why = r"no connection to the task \(127.0.0.1:1\): Too many .*see ulimit -n"
    with no_file_left(but=files), pytest.raises(ClusterError, match=why):
        EntryChannel("127.0.0.1:1")
