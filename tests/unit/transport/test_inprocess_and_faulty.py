"""The network inside one process, and the channel that misbehaves on purpose."""

import threading
import time

import pytest

from torchquorum.transport.codec import Frame
from torchquorum.transport.faulty import Faults, FaultyChannel
from torchquorum.transport.inprocess import InProcessChannel, InProcessListener, InProcessNetwork


@pytest.fixture
def pair() -> tuple[InProcessListener, InProcessChannel]:
    network = InProcessNetwork()
    return network.listen("a:1"), network.connect("a:1", b"w")


def drain(listener: InProcessListener) -> list[bytes]:
    found = []
    while (received := listener.receive(0.0)) is not None:
        found.append(bytes(received[1][0]))
    return found


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


# -- faults ---------------------------------------------------------------------------------------------------------------


def sent_through(faults: Faults, count: int = 400, seed: int = 1) -> list[int]:
    network = InProcessNetwork()
    listener = network.listen("a:1")
    channel = FaultyChannel(network.connect("a:1", b"w"), faults, seed)
    for k in range(count):
        channel.send([str(k).encode()])
    return [int(f) for f in drain(listener)]


def test_without_faults_everything_passes() -> None:
    assert sent_through(Faults()) == list(range(400))


def test_some_messages_are_dropped() -> None:
    arrived = sent_through(Faults(drop=0.25))
    assert 250 < len(arrived) < 350
    assert arrived == sorted(set(arrived))


def test_some_messages_are_doubled() -> None:
    arrived = sent_through(Faults(duplicate=0.25))
    assert 450 < len(arrived) < 550
    assert set(arrived) == set(range(400))


def test_all_messages_of_a_cut_are_lost_in_either_direction_and_then_they_pass_again() -> None:
    assert sent_through(Faults(cut_at=3, cut_for=4), count=10) == [0, 1, 6, 7, 8, 9]
    network = InProcessNetwork()
    listener = network.listen("a:1")
    channel = FaultyChannel(network.connect("a:1", b"w"), Faults(cut_at=2, cut_for=2))
    for k in range(5):
        listener.send(b"w", [str(k).encode()])
    assert [channel.receive(0.0) for _ in range(4)] == [[b"0"], [b"3"], [b"4"], None]


def test_the_same_seed_makes_the_same_faults() -> None:
    faults = Faults(drop=0.2, duplicate=0.2)
    assert sent_through(faults, seed=7) == sent_through(faults, seed=7) != sent_through(faults, seed=8)


def test_a_late_message_arrives_later_and_as_it_was(pair: tuple[InProcessListener, InProcessChannel]) -> None:
    listener, inner = pair
    channel = FaultyChannel(inner, Faults(delay=1.0, delay_s=0.01))
    memory = bytearray(b"old")
    channel.send([memory])
    memory[:] = b"new"
    assert drain(listener) == []
    assert channel.receive(0.05) is None  # whoever waits also lets late messages go
    assert drain(listener) == [b"old"]


def test_a_late_answer_is_received_later(pair: tuple[InProcessListener, InProcessChannel]) -> None:
    listener, inner = pair
    channel = FaultyChannel(inner, Faults(delay=1.0, delay_s=0.02))
    listener.send(b"w", [b"x"])
    started = time.monotonic()
    assert channel.receive(0.0) is None
    received: list[Frame] | None = channel.receive(10.0)
    assert received == [b"x"]
    assert time.monotonic() - started >= 0.02
