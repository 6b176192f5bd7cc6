"""The network inside one process."""

import threading
import time

import pytest

from tests.manual_clock import ManualClock
from tests.unit.wire.messages import drain
from torchquorum.wire.channel import Pieces
from torchquorum.wire.inprocess import InProcessChannel, InProcessListener, InProcessNetwork


@pytest.fixture
def pair() -> tuple[InProcessListener, InProcessChannel]:
    network = InProcessNetwork()
    return network.listen("a:1"), network.connect("a:1", b"w")


def test_messages_arrive_in_order_with_their_sender_and_answers_come_back() -> None:
    network = InProcessNetwork()
    one, two = network.connect("a:1", b"one"), network.connect("a:1", b"two")
    one.send([b"1"])
    two.send([b"2", b"tensor"])
    listener = network.listen("a:1")  # later than its callers
    assert listener.receive(0.0) == (b"one", [b"1"])
    assert listener.receive(0.0) == (b"two", [b"2", b"tensor"])
    assert listener.receive(0.0) is None
    listener.send(b"two", [b"answer"])
    assert (one.receive(0.0), two.receive(0.0)) == (None, [b"answer"])


def test_the_same_name_at_two_addresses_is_two_connections() -> None:
    network = InProcessNetwork()
    there, elsewhere = network.connect("a:1", b"w"), network.connect("a:2", b"w")
    network.listen("a:1").send(b"w", [b"x"])
    assert (there.receive(0.0), elsewhere.receive(0.0)) == ([b"x"], None)


def test_frames_are_copied_on_their_way(pair: tuple[InProcessListener, InProcessChannel]) -> None:
    listener, channel = pair
    memory = bytearray(b"old")
    channel.send([memoryview(memory)])
    memory[:] = b"new"
    assert drain(listener) == [b"old"]


def test_receive_wakes_up_when_something_comes(pair: tuple[InProcessListener, InProcessChannel]) -> None:
    listener, channel = pair
    timer = threading.Timer(0.02, channel.send, [[b"x"]])
    timer.start()
    assert listener.receive(10.0) == (b"w", [b"x"])
    timer.join()
    assert channel.receive(0.01) is None


def test_wait_returns_for_either_side_or_when_time_is_up(pair: tuple[InProcessListener, InProcessChannel]) -> None:
    listener, channel = pair
    listener.wait([channel], 0.005)
    listener.send(b"w", [b"x"])
    started = time.monotonic()
    listener.wait([channel], 10.0)
    channel.send([b"y"])
    listener.wait([], 10.0)
    assert time.monotonic() - started < 5


def test_a_frame_in_pieces_arrives_as_one(pair: tuple[InProcessListener, InProcessChannel]) -> None:
    listener, channel = pair
    channel.send([b"head", Pieces([memoryview(b"one"), memoryview(b"two")])])
    assert listener.receive(0.0) == (b"w", [b"head", b"onetwo"])


def test_a_listener_that_waits_can_be_woken_before_and_while_it_waits(
    pair: tuple[InProcessListener, InProcessChannel],
) -> None:
    listener, _ = pair
    listener.wake()
    started = time.monotonic()
    assert listener.receive(10.0) is None
    timer = threading.Timer(0.02, listener.wake)
    timer.start()
    assert listener.receive(10.0) is None
    timer.join()
    assert time.monotonic() - started < 5


def test_waits_take_their_time_from_the_clock_that_is_given() -> None:
    clock = ManualClock()
    network = InProcessNetwork(clock)
    listener, channel = network.listen("a:1"), network.connect("a:1", b"w")
    began = clock.now()
    assert listener.receive(100.0) is None and channel.receive(200.0) is None
    assert clock.now() == began + 300.0
    listener.wait([channel], 1.0)
    assert began + 301.0 <= clock.now() < began + 301.01
    channel.send([b"x"])
    listener.wait([channel], 50.0)
    assert clock.now() < began + 301.01
