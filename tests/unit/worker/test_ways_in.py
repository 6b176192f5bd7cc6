"""The faster ways to a ps task that a worker tries: who is shown out, or meets silence, stays with ZeroMQ."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from torchquorum.cluster import ClusterSpec
from torchquorum.transport.inprocess import InProcessNetwork
from torchquorum.worker.client import Client, Patience
from torchquorum.worker.resume import enter_door, take_lane

WORD = "00" * 32
DOOR = f"torchquorum/test-of-ways-in/{os.getpid()}"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def client(said: list[str]) -> Iterator[Client]:
    cluster = ClusterSpec({"ps": ["localhost:1001"], "worker": ["localhost:2001"]})
    patience = Patience(silence_s=0.3)
    made = Client(cluster, 0, 1, InProcessNetwork().connect, patience=patience, say=said.append)
    yield made
    made.close()


def shows_out(listening: socket.socket) -> None:
    """Lets one in and hangs up, as a ps does that has no file left."""
    with suppress(OSError):
        listening.accept()[0].close()


def says_nothing(listening: socket.socket) -> None:
    """Lets nobody in: the system holds the connection, and takes what is said."""


@pytest.mark.parametrize("ps", [shows_out, says_nothing])
def test_a_worker_that_is_not_answered_on_a_lane_says_so_and_goes_on_without(
    client: Client, said: list[str], ps: Callable[[socket.socket], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=ps, args=(listening,))
        thread.start()
        port = listening.getsockname()[1]
        assert take_lane(client, 0, f"{port}/{WORD}") is None
        thread.join(30)
    assert len(said) == 1 and said[0].endswith(
        f"no direct connection to port {port} of /job:ps/task:0 (nobody answers there); ZeroMQ does it, slower"
    )
    assert take_lane(client, 0, f"{port}/{WORD}") is None and "refused" in said[-1]


@pytest.mark.parametrize("ps", [shows_out, says_nothing])
def test_a_worker_that_is_not_answered_at_a_door_goes_on_without(
    client: Client, ps: Callable[[socket.socket], None]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("\0" + DOOR)
        listening.listen()
        thread = threading.Thread(target=ps, args=(listening,))
        thread.start()
        assert enter_door(client, DOOR) is None
        thread.join(30)
    assert enter_door(client, DOOR) is None
