"""The channel that misbehaves on purpose."""

import pytest

from tests.manual_clock import ManualClock
from tests.unit.wire.messages import drain
from torchquorum.wire.faulty import Faults, FaultyChannel
from torchquorum.wire.inprocess import InProcessChannel, InProcessListener, InProcessNetwork


@pytest.fixture
def pair() -> tuple[InProcessListener, InProcessChannel]:
    network = InProcessNetwork()
    return network.listen("a:1"), network.connect("a:1", b"w")


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
    clock = ManualClock()
    channel = FaultyChannel(inner, Faults(delay=1.0, delay_s=0.01), clock=clock)
    memory = bytearray(b"old")
    channel.send([memory])
    memory[:] = b"new"
    assert channel.receive(0.0) is None and drain(listener) == []
    clock.advance(0.01)
    assert channel.receive(0.0) is None  # to receive is also to let late messages go
    assert drain(listener) == [b"old"]


def test_a_late_answer_is_received_later() -> None:
    clock = ManualClock()
    network = InProcessNetwork(clock)
    channel = FaultyChannel(network.connect("a:1", b"w"), Faults(delay=1.0, delay_s=0.02), clock=clock)
    network.listen("a:1").send(b"w", [b"x"])
    began = clock.now()
    assert channel.receive(0.0) is None
    assert channel.receive(10.0) == [b"x"]
    assert clock.now() == pytest.approx(began + 0.02)
