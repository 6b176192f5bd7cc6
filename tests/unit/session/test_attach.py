"""The one path to the ps tasks, with a link that the test scripts, on a clock that moves only in `sleep`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchquorum as tq
from tests.manual_clock import ManualClock
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.errors import DeadlineError, LostCreationError, LostPlaceError, LostVariablesError, TaskLostError
from torchquorum.session.attach import REJOIN_S, RETRY_EVERY_S, Attachment, AttachRequest, AttachResult
from torchquorum.session.config import MemberOptions, RestoreOptions, Setup
from torchquorum.session.join import Task
from torchquorum.session.states import SessionState
from torchquorum.session.stop_condition import StopCondition
from torchquorum.wire.inprocess import InProcessNetwork
from torchquorum.wire.messages import Create
from torchquorum.wire.rpc import Patience
from torchquorum.worker.run_view import RunView
from torchquorum.worker.step import Step
from torchquorum.worker.worker_end import WorkerEnd

PUSHED = Step(7, 4, True, "fresh", 0, 0.1, False)


class QuietClock(ManualClock):
    """A manual clock that the heartbeat's thread does not move."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)


class World:
    """What the ps tasks are, and what was done with them."""

    def __init__(self) -> None:
        self.created, self.version, self.generation = [False, False], 0, 1
        self.kept: list[tuple[int, int]] = []
        self.failures: list[tuple[str, Exception]] = []  # (what is being done, what goes wrong then)
        self.done: list[str] = []
        self.links: list[Any] = []

    def do(self, what: str) -> None:
        self.done.append(what)
        if self.failures and self.failures[0][0] == what.split(" ")[0]:
            raise self.failures.pop(0)[1]


def make(
    world: World,
    *,
    index: int = 0,
    clock: QuietClock | None = None,
    wait_for_workers: int = 1,
    logdir: str | None = None,
    **restore: Any,
) -> Attachment:
    """Returns the attachment of a worker whose links are those of the world."""

    class ScriptedLink(RunView):
        """A link that does what the world says."""

        def __init__(self, end: WorkerEnd) -> None:
            super().__init__()
            self.incarnation = end.incarnation
            self.settings: list[Any] = []
            self.positions = self
            self.while_waiting, self.unsettled, self.position, self.went_on = (
                None,
                SimpleNamespace(push=SimpleNamespace(local_step=len(world.links))),
                None,
                False,
            )
            world.links.append(self)

        def go_on_from(self, before: Any) -> None:
            self.went_on = True

        def hello(self) -> list[bool]:
            world.do("hello")
            return list(world.created)

        def wait_for_place(self) -> None:
            world.do("place")

        def create(self, message: Create, flats: Any, begins: Any = ()) -> None:
            world.do("confirm" if message.only_existing else "create")
            world.created = [True, True]

        def join(self, plan: Any, flat: Any) -> None:
            world.do("join")
            self.version, self.generation, self.kept = world.version, world.generation, world.kept

        def wait_for_workers(self, count: int, at_most_s: float | None = None, *, begins: bool = False) -> None:
            world.do(f"wait {count} {at_most_s}")

        def take_up(self, unsettled: Any) -> Step:
            world.do(f"resume push {unsettled.push.local_step}")
            return PUSHED

        def begin(self, capture: Callable[[], Any], version: int) -> None:
            world.do("positions")

        def close(self) -> None:
            pass

    model = torch.nn.Linear(2, 2)
    ps, workers = ["localhost:1000", "localhost:1001"], ["localhost:2000", "localhost:2001"]
    setup = Setup(
        task=Task(
            cluster=ClusterSpec({"ps": ps, "worker": workers}),
            id=TaskId("worker", index),
            connect=InProcessNetwork().connect,
            clock=clock or QuietClock(),
        ),
        model=model,
        optimizer=tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
        logdir=logdir,
        patience=Patience(start_s=1.0),
        restore=RestoreOptions(**restore),
        member=MemberOptions(wait_for_workers=wait_for_workers),
    )
    make_link: Any = ScriptedLink
    return Attachment(setup, StopCondition(setup.stop, setup.clock), make_link=make_link)


def attach(attachment: Attachment, **entry: Any) -> AttachResult:
    try:
        return attachment.attach(AttachRequest(**entry))
    finally:
        attachment.connection.close()


def test_the_chief_creates_joins_and_waits_in_this_order(tmp_path: Any) -> None:
    world, states = World(), []
    found = attach(make(world, wait_for_workers=2, logdir=str(tmp_path)), creates=True, on_state=states.append)
    assert world.done == ["hello", "create", "join", "wait 2 None", "positions"]
    assert states == [SessionState.CREATING, SessionState.WAITING]
    assert (found.version, found.steps_back, found.resumed) == (0, 0, None)


def test_another_worker_creates_nothing() -> None:
    world, states = World(), []
    attach(make(world, index=1), on_state=states.append)
    assert world.done == ["hello", "join", "wait 1 None"] and states == [SessionState.WAITING]


def test_a_chief_confirms_live_variables_and_a_compute_task_does_not() -> None:
    for confirms, expected in ((True, ["hello", "place", "confirm", "join"]), (False, ["hello", "place", "join"])):
        world = World()
        world.created = [True, True]
        attach(make(world), creates=True, confirms=confirms)
        assert world.done[:-1] == expected


def test_a_client_only_creates() -> None:
    world = World()
    found = attach(make(world), joins=False, creates=True)
    assert world.done == ["hello", "create"] and found.plan.num_shards == 2


@pytest.mark.parametrize("error", [TaskLostError("ps lost"), LostCreationError("made anew")])
def test_a_ps_that_is_lost_at_the_start_is_tried_again_from_hello_with_a_link_of_the_same_incarnation(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    world, states, clock = World(), [], QuietClock()
    world.failures = [("join", error)]
    attach(make(world, clock=clock), creates=True, on_state=states.append)
    assert world.done == ["hello", "create", "join", "hello", "place", "confirm", "join", "wait 1 None"]
    assert states[2] is SessionState.CONNECTING and clock.now() == 1000.0 + RETRY_EVERY_S
    first, second = world.links
    assert first.incarnation == second.incarnation and second.went_on and not first.went_on
    assert f"{error}\n/job:worker/task:0: trying to begin for 1 s" in capsys.readouterr().err


@pytest.mark.parametrize("error", [LostPlaceError("unknown"), DeadlineError("late")])
def test_what_waiting_does_not_heal_ends_the_start_at_once(error: Exception) -> None:
    world = World()
    world.failures = [("wait", error)]
    with pytest.raises(type(error)):
        attach(make(world), creates=True)
    assert world.done.count("hello") == 1


@pytest.mark.parametrize("error", [TaskLostError("lost"), LostPlaceError("unknown"), DeadlineError("late")])
def test_after_a_loss_all_of_these_are_tried_again_until_the_deadline(error: Exception) -> None:
    world, clock = World(), QuietClock()
    attachment = make(world, clock=clock)
    before = attach(attachment, creates=True).link
    world.failures = [("join", error)] * 100
    with pytest.raises(type(error)):
        attach(attachment, creates=True, before=before)
    assert 1000.0 + 1.0 < clock.now() <= 1000.0 + 1.0 + 2 * RETRY_EVERY_S


def test_after_a_loss_that_lost_nothing_the_push_is_resumed_and_nothing_is_created() -> None:
    world = World()
    attachment = make(world)
    before = attach(attachment, creates=True).link
    world.done.clear()
    states: list[SessionState] = []
    found = attach(attachment, creates=True, before=before, on_state=states.append)
    assert world.done == ["hello", "join", f"wait 1 {REJOIN_S}", "resume push 0"]
    assert found.resumed == PUSHED and found.steps_back == 0


@pytest.mark.parametrize(
    ("entry", "generation", "resumes"),
    [
        ({}, 2, True),
        ({"has_shares": True}, 1, True),
        ({"has_shares": True}, 2, False),  # a restored ps task 0 does not know the batches in progress
        ({"resumes": False}, 1, False),  # after the loop
    ],
)
def test_when_a_push_is_resumed(entry: dict[str, Any], generation: int, resumes: bool) -> None:
    world = World()
    attachment = make(world)
    before = attach(attachment, creates=True).link
    world.generation = generation
    found = attach(attachment, creates=True, before=before, **entry)
    assert (found.resumed is not None) is resumes


@pytest.mark.parametrize("version", [5, 12])  # 12: others have gone on since
def test_a_run_that_went_back_resumes_no_push(version: int) -> None:
    world = World()
    world.version = 9
    attachment = make(world)
    before = attach(attachment, creates=True).link
    world.version, world.generation, world.kept = version, 2, [(1, 5)]
    found = attach(attachment, creates=True, before=before)
    assert (found.version, found.steps_back, found.resumed) == (version, 4, None)


def test_variables_that_are_lost_without_a_checkpoint_are_an_error_unless_the_run_may_start_afresh() -> None:
    world = World()
    attachment = make(world)
    before = attach(attachment, creates=True).link
    world.created = [False, False]
    with pytest.raises(LostVariablesError, match=r"/job:ps/task:0, /job:ps/task:1 was restarted .* Give the session a"):
        attach(attachment, creates=True, before=before)
    world = World()
    attachment = make(world, start_afresh=True)
    first = attach(attachment, creates=True)
    parameters = attachment.initializer.flats[0]
    assert parameters is not None
    values = [p.detach().clone() for p in parameters.parameters]
    for parameter in parameters.parameters:
        parameter.data.add_(1.0)
    world.created = [False, False]
    attach(attachment, creates=True, before=first.link)
    assert all(torch.equal(p, v) for p, v in zip(parameters.parameters, values, strict=True))


def test_a_chief_that_went_on_with_live_variables_starts_afresh_with_its_models_own_values() -> None:
    world = World()
    attachment = make(world, start_afresh=True)
    world.created = [True, True]
    first = attach(attachment, creates=True)
    parameters = attachment.initializer.flats[0]
    assert parameters is not None
    values = [p.detach().clone() for p in parameters.parameters]
    for parameter in parameters.parameters:
        parameter.data.add_(1.0)  # what the ps tasks hold
    world.created = [False, False]
    attach(attachment, creates=True, before=first.link)
    assert all(torch.equal(p, v) for p, v in zip(parameters.parameters, values, strict=True))
