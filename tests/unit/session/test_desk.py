"""The desk of a compute task: what it lets through when a client was away, and when it was itself."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.graph_cluster import listening
from torchquorum.rules import Async
from torchquorum.session.desk import Desk
from torchquorum.transport import codec
from torchquorum.transport import graph_messages as g
from torchquorum.transport.messages import OptimizerSpec, Plan
from torchquorum.transport.zmq_channel import ZmqChannel

LIVENESS_S = 4.0


@pytest.fixture
def desk() -> Iterator[Desk]:
    held = listening()
    made = Desk(
        "/job:worker/task:0",
        f"localhost:{held.getsockname()[1]}",
        listen_fd=held.detach(),
        device="cpu",
        cluster={"worker": []},
    )
    yield made
    made.close()


@pytest.fixture
def channel(desk: Desk) -> Iterator[ZmqChannel]:
    made = ZmqChannel(desk.address, b"client")
    yield made
    made.close()


def ask(channel: ZmqChannel, message: g.Message) -> g.AnyGraphMessage:
    channel.send([codec.encode(message)])
    received = channel.receive(30.0)
    assert received is not None
    return g.split(received)[0]


def begin(channel: ZmqChannel) -> g.State:
    plan = Plan(
        variables=[],
        optimizer=OptimizerSpec("SGD", []),
        rule=Async(),
        num_shards=1,
        num_workers=1,
        liveness_s=LIVENESS_S,
    )
    state = ask(channel, g.Train("run", "a client", g.GraphSpec("empty", [], [], []), plan, g.RunOptions()))
    assert isinstance(state, g.State) and state.state == "loading"
    return state


def give(channel: ZmqChannel, *numbers: int) -> None:
    for number in numbers:
        channel.send([codec.encode(g.Batch("run", number, 0, []))])


def take_all(desk: Desk) -> list[int]:
    taken = []
    while (work := desk.take(0.0)) is not None:
        if isinstance(work.message, g.Batch):
            taken.append(work.message.number)
    return taken


def test_a_batch_that_is_sent_twice_is_in_the_tray_once_and_one_that_is_not_there_is_said_to_be_unknown(
    desk: Desk, channel: ZmqChannel
) -> None:
    stamp = begin(channel).stamp
    give(channel, 1, 2, 1, 2)
    state = ask(channel, g.Ask("run", [1, 2, 3], stamp))
    assert isinstance(state, g.State) and state.unknown == [3]
    assert take_all(desk) == [1, 2]
    assert desk.may_begin(1) is True


def test_nothing_is_begun_on_the_word_of_a_client_that_may_have_given_us_up(desk: Desk, channel: ZmqChannel) -> None:
    stamp = begin(channel).stamp
    give(channel, 1, 2)
    assert isinstance(ask(channel, g.Ask("run", [1, 2], stamp)), g.State)
    desk._run.lease_at -= LIVENESS_S  # as if this process had been stopped meanwhile
    assert desk.may_begin(1) is None
    old = time.monotonic() - LIVENESS_S
    assert isinstance(ask(channel, g.Ask("run", [1, 2], old)), g.State)  # it had lain in the socket
    assert desk.may_begin(1) is None
    state = ask(channel, g.Ask("run", [2], time.monotonic()))  # now the client has found us again
    assert isinstance(state, g.State) and state.unknown == []
    assert desk.may_begin(1) is False and desk.may_begin(2) is True
    assert take_all(desk) == [2]


def test_a_recalled_batch_comes_back_only_if_it_was_not_begun(desk: Desk, channel: ZmqChannel) -> None:
    stamp = begin(channel).stamp
    give(channel, 1, 2)
    ask(channel, g.Ask("run", [1, 2], stamp))
    desk.take(0.0)  # the Train
    desk.take(0.0)  # batch 1, begun
    channel.send([codec.encode(g.Recall("run", 1))])
    answer = ask(channel, g.Recall("run", 2))
    assert isinstance(answer, g.Recalled) and answer.number == 2
    assert take_all(desk) == []


@pytest.mark.parametrize("reason", ["fresh", "expired"])
def test_a_batch_is_computed_again_only_if_its_gradient_came_too_late(
    desk: Desk, channel: ZmqChannel, reason: str
) -> None:
    stamp = begin(channel).stamp
    give(channel, 1)
    ask(channel, g.Ask("run", [1], stamp))
    assert take_all(desk) == [1]
    desk.finish_batch(g.Done("run", desk.life, 1, 0.5, 3, 3, reason == "fresh", reason, 0, 0.1, False, 0.01))
    received = channel.receive(30.0)
    assert received is not None and isinstance(g.split(received)[0], g.Done)
    give(channel, 1)
    state = ask(channel, g.Ask("run", [1], stamp))
    assert isinstance(state, g.State) and state.unknown == []
    if reason == "fresh":
        received = channel.receive(30.0)
        assert received is not None and isinstance(g.split(received)[0], g.Done)  # said again
    assert take_all(desk) == ([1] if reason == "expired" else [])


def test_who_does_not_name_the_run_hears_nothing_with_which_to_speak_in_its_name(
    desk: Desk, channel: ZmqChannel
) -> None:
    begin(channel)
    desk.update(incarnation=12345, state="ready", version=9)
    own = ask(channel, g.Ask("run", [], 0.0))
    assert isinstance(own, g.State) and (own.run, own.incarnation, own.version) == ("run", 12345, 9)
    with closing(ZmqChannel(desk.address, b"stranger")) as stranger:
        for guess in (
            g.Ask("", [], 0.0),
            g.Ask("guess", [1], 0.0),
            g.Finish("guess", True, True),
            g.Recall("guess", 1),
        ):
            told = ask(stranger, guess)
            assert isinstance(told, g.State) and told.state == "ready"
            assert (told.run, told.incarnation, told.version, told.local_step) == ("", 0, 0, 0)
    assert not any(isinstance(w.message, g.Finish) for w in desk._tray)
