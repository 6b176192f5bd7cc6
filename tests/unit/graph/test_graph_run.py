"""What the client's two threads share: waits with a deadline that say how every task is doing."""

import os
from collections.abc import Iterator

import pytest

from tests.manual_clock import ManualClock, ScriptedChannel
from torchquorum.cluster import TaskId
from torchquorum.errors import DeadlineError, TorchQuorumError
from torchquorum.graph.assignments import Assignments, GivenBatch
from torchquorum.graph.contact import Contact
from torchquorum.graph.graph_run import BUSY_S, ContactTrouble, GraphRun


class PassingClock(ManualClock):
    """Every look at it takes a second."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def run(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphRun]:
    monkeypatch.setattr("torchquorum.graph.graph_run.POLL_S", 0.001)
    clock = PassingClock()
    contacts = [
        Contact(TaskId("worker", n), f"host:{n}", ScriptedChannel(clock, lambda _: []))  # pyright: ignore[reportArgumentType]
        for n in range(2)
    ]
    made = GraphRun("run", contacts, Assignments(), say_s=3.0, say=lines.append, clock=clock)
    yield made
    os.close(made.wake_fd)


def test_a_wait_says_what_it_waits_for_and_how_the_tasks_are_and_gives_up(run: GraphRun, lines: list[str]) -> None:
    run.add(GivenBatch(7, 0, [], []))
    with pytest.raises(DeadlineError, match=r"waited \d+ s for a batch and gave up.*Start one: torchquorum join"):
        run.wait(lambda: False, "a batch", 8.0, lambda: None)
    assert len(lines) == 2 and lines[0] == (
        "waiting for a batch: 3 s. /job:worker/task:0 (host:0) has not answered yet; /job:worker/task:1 (host:1) has not "
        "answered yet; not given to any task: batch 7."
    )


def test_a_wait_ends_with_what_the_dispatcher_failed_of(run: GraphRun) -> None:
    run.failure = ZeroDivisionError("in the thread")
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        run.wait(lambda: False, "a batch", 1e9, lambda: None)


def test_there_is_hope_while_a_task_has_no_trouble_or_may_become_free(run: GraphRun) -> None:
    run.troubles[0] = ContactTrouble("task", "is another task", 1000.0)
    run.check_hope()
    run.troubles[1] = ContactTrouble("busy", "is busy", 1000.0)
    run.check_hope()
    run.troubles[1].since -= BUSY_S
    with pytest.raises(TorchQuorumError, match="no compute task can join: is another task; is busy"):
        run.check_hope()


def test_all_have_left_when_all_were_told_and_none_is_in_the_run(run: GraphRun) -> None:
    first, second = run.contacts
    first.life = second.life = "life"
    first.state, second.state = "ready", "refused"
    run.told_all = True
    assert not run.all_left
    first.finished = True
    assert run.all_left
    run.told_all = False
    assert not run.all_left
