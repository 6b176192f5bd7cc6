"""The inbox of a compute task: what it lets through when a client was away, and when it was itself."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.graph_cluster import listening
from tests.manual_clock import ManualClock
from torchquorum.cluster import TaskId
from torchquorum.graph import graph_messages as g
from torchquorum.graph.inbox import TAKE_OVER_S, Inbox
from torchquorum.rules import Async
from torchquorum.wire import codec
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.messages import Fault, OptimizerSpec, Plan
from torchquorum.worker.step import Step

LIVENESS_S = 4.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def inbox(clock: ManualClock) -> Iterator[Inbox]:
    held = listening()
    addresses = {"worker": [f"localhost:{held.getsockname()[1]}"]}
    made = Inbox(TaskId("worker", 0), addresses, listen_fd=held.detach(), clock=clock)
    yield made
    made.close()


@pytest.fixture
def channel(inbox: Inbox) -> Iterator[EntryChannel]:
    made = EntryChannel(inbox.address)
    yield made
    made.close()


def ask(channel: EntryChannel, message: g.Message) -> g.AnyGraphMessage:
    channel.send([codec.encode(message)])
    received = channel.receive(30.0)
    assert received is not None
    return g.split(received)[0]


def train(run: str = "run", graph: str = "empty") -> g.Train:
    plan = Plan(
        variables=[],
        optimizer=OptimizerSpec("SGD", []),
        rule=Async(),
        num_shards=1,
        num_workers=1,
        liveness_s=LIVENESS_S,
    )
    return g.Train(run, "a client", g.GraphSpec(graph, [], [], []), plan, g.RunOptions())


def begin(channel: EntryChannel) -> g.State:
    state = ask(channel, train())
    assert isinstance(state, g.State) and state.state == "loading"
    return state


def give(channel: EntryChannel, *numbers: int) -> None:
    for number in numbers:
        channel.send([codec.encode(g.Batch("run", number, 0, []))])


def take_all(inbox: Inbox) -> list[int]:
    taken = []
    while (work := inbox.take(0.0)) is not None:
        if isinstance(work.message, g.Batch):
            taken.append(work.message.number)
    return taken


def test_a_batch_that_is_sent_twice_is_queued_once_and_one_that_is_not_there_is_reported_unknown(
    inbox: Inbox, channel: EntryChannel
) -> None:
    stamp = begin(channel).stamp
    give(channel, 1, 2, 1, 2)
    state = ask(channel, g.Ask("run", [1, 2, 3], stamp))
    assert isinstance(state, g.State) and state.unknown == [3]
    assert take_all(inbox) == [1, 2]
    assert inbox.may_begin(1) is True


def test_nothing_is_begun_for_a_client_that_may_have_given_the_task_up(
    inbox: Inbox, channel: EntryChannel, clock: ManualClock
) -> None:
    stamp = begin(channel).stamp
    give(channel, 1, 2)
    assert isinstance(ask(channel, g.Ask("run", [1, 2], stamp)), g.State)
    assert inbox.may_begin(1) is True
    clock.advance(LIVENESS_S)  # as if this process had been stopped meanwhile
    assert inbox.may_begin(1) is None
    assert isinstance(ask(channel, g.Ask("run", [1, 2], stamp)), g.State)  # it had lain in the socket
    assert inbox.may_begin(1) is None
    state = ask(channel, g.Ask("run", [2], clock.now()))  # now the client has found the task again
    assert isinstance(state, g.State) and state.unknown == []
    assert inbox.may_begin(1) is False and inbox.may_begin(2) is True
    assert take_all(inbox) == [2]


def test_a_recalled_batch_comes_back_only_if_it_was_not_begun(inbox: Inbox, channel: EntryChannel) -> None:
    stamp = begin(channel).stamp
    give(channel, 1, 2)
    ask(channel, g.Ask("run", [1, 2], stamp))
    inbox.take(0.0)  # the Train
    inbox.take(0.0)  # batch 1, begun
    channel.send([codec.encode(g.Recall("run", 1))])
    answer = ask(channel, g.Recall("run", 2))
    assert isinstance(answer, g.Recalled) and answer.number == 2
    assert take_all(inbox) == []


@pytest.mark.parametrize("reason", ["fresh", "expired"])
def test_a_batch_is_computed_again_only_if_its_gradient_came_too_late(
    inbox: Inbox, channel: EntryChannel, reason: str
) -> None:
    stamp = begin(channel).stamp
    give(channel, 1)
    ask(channel, g.Ask("run", [1], stamp))
    assert take_all(inbox) == [1]
    inbox.finish_batch(g.Done("run", inbox.life, 1, 0.5, Step(3, 3, reason == "fresh", reason, 0, 0.1, False), 0.01))
    received = channel.receive(30.0)
    assert received is not None and isinstance(g.split(received)[0], g.Done)
    give(channel, 1)
    state = ask(channel, g.Ask("run", [1], stamp))
    assert isinstance(state, g.State) and state.unknown == []
    if reason == "fresh":
        received = channel.receive(30.0)
        assert received is not None and isinstance(g.split(received)[0], g.Done)  # sent again
    assert take_all(inbox) == ([1] if reason == "expired" else [])


def test_a_peer_that_does_not_name_the_run_gets_nothing_with_which_to_impersonate_client_or_worker(
    inbox: Inbox, channel: EntryChannel
) -> None:
    begin(channel)
    inbox.update(incarnation=12345, state="ready", version=9)
    own = ask(channel, g.Ask("run", [], 0.0))
    assert isinstance(own, g.State) and (own.run, own.incarnation, own.version) == ("run", 12345, 9)
    with closing(EntryChannel(inbox.address)) as stranger:
        for guess in (
            g.Ask("", [], 0.0),
            g.Ask("guess", [1], 0.0),
            g.Finish("guess", True, True),
            g.Recall("guess", 1),
        ):
            told = ask(stranger, guess)
            assert isinstance(told, g.State) and told.state == "ready"
            assert (told.run, told.incarnation, told.version, told.local_step) == ("", 0, 0, 0)
    while (work := inbox.take(0.0)) is not None:
        assert not isinstance(work.message, g.Finish)


@pytest.mark.parametrize(("graph", "silent_s"), [("empty", TAKE_OVER_S), ("empty", TAKE_OVER_S - 1), ("other", 99.0)])
def test_only_a_client_with_the_same_graph_takes_a_run_over_and_only_from_one_that_is_silent(
    inbox: Inbox, channel: EntryChannel, clock: ManualClock, graph: str, silent_s: float
) -> None:
    begin(channel)
    inbox.update(state="ready", incarnation=7)
    give(channel, 1)
    clock.advance(silent_s)
    with closing(EntryChannel(inbox.address)) as second:
        answer = ask(second, train("second run", graph))
        if graph == "empty" and silent_s >= TAKE_OVER_S:
            assert isinstance(answer, g.State) and (answer.run, answer.incarnation) == ("second run", 7)
            assert take_all(inbox) == []  # the batch of the client that is gone
        else:
            assert isinstance(answer, Fault) and answer.kind == "busy"
            assert take_all(inbox) == [1]
