"""The faster transports that a worker tries: where nobody answers it stays with the connection that it has."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from torchquorum.wire import transports
from torchquorum.wire.inprocess import InProcessChannel, InProcessNetwork
from torchquorum.wire.messages import Way
from torchquorum.wire.transport import Transport
from torchquorum.worker.ways import Target, upgrade

UNIX = f"torchquorum/test-of-ways/{os.getpid()}"
REMOTE = Target(task="/job:ps/task:0", host="127.0.0.1", local=False, greeting=b"hello", answer_s=0.3)
LOCAL = Target(task="/job:ps/task:0", host="127.0.0.1", local=True, greeting=b"hello", answer_s=0.3)


def entry() -> InProcessChannel:
    return InProcessNetwork().connect("entry:1", b"worker")


def closes(listening: socket.socket) -> None:
    """Accepts one connection and closes it, as a ps does that has no file descriptor left."""
    with suppress(OSError):
        listening.accept()[0].close()


def says_nothing(listening: socket.socket) -> None:
    """Accepts nothing: the system holds the connection, and takes what is sent."""


@pytest.mark.parametrize("ps", [closes, says_nothing])
def test_a_worker_that_is_not_answered_over_a_unix_socket_tries_the_next_way_then_says_so_and_stays_where_it_is(
    ps: Callable[[socket.socket], None],
) -> None:
    said: list[str] = []
    channel = entry()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind("\0" + UNIX)
        listening.listen()
        thread = threading.Thread(target=ps, args=(listening,))
        thread.start()
        ways = [Way("unix", UNIX), Way("unix", UNIX + "/none")]
        assert upgrade(channel, ways, LOCAL, say=said.append) is channel
        thread.join(30)
    assert len(said) == 1 and said[0].endswith("TCP does it, slower")
    assert "(unix: nobody answers there; unix: Connection refused)" in said[0]


def test_ways_that_are_unknown_or_not_for_this_host_are_passed_over_in_silence() -> None:
    said: list[str] = []
    channel = entry()
    assert upgrade(channel, [Way("unix", UNIX), Way("avian", "cage 3")], REMOTE, say=said.append) is channel
    assert said == []


def test_the_first_way_that_answers_is_taken_and_the_old_channel_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    network, tried, closed = InProcessNetwork(), [], []
    listener = network.listen("there:1")

    def connect(host: str, where: str, _clock: object) -> InProcessChannel:
        tried.append((host, where))
        if where == "nowhere":
            raise ConnectionRefusedError
        listener.send(b"worker", [b"welcome"])
        return network.connect(where, b"worker")

    monkeypatch.setattr(
        transports, "TRANSPORTS", [Transport(kind="queue", same_host=False, listen=lambda _: None, connect=connect)]
    )
    channel = entry()
    monkeypatch.setattr(channel, "close", lambda: closed.append(channel))
    ways = [Way("queue", "nowhere"), Way("queue", "there:1"), Way("queue", "elsewhere")]
    better = upgrade(channel, ways, REMOTE, say=lambda _: None)
    assert tried == [("127.0.0.1", "nowhere"), ("127.0.0.1", "there:1")]
    assert better is not channel and closed == [channel]
    assert listener.receive(0.0) == (b"worker", [b"hello"])
