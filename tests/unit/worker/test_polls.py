"""What a worker waits for by asking again and again."""

from __future__ import annotations

from typing import Any

import pytest

import torchquorum.wire.messages as m
from tests.unit.worker.ps_by_hand import PsTasks
from torchquorum.errors import DeadlineError, TaskLostError
from torchquorum.worker.polls import (
    SILENT_S,
    WORKERS_S,
    wait_for_place,
    wait_for_save,
    wait_for_workers,
    wait_until_settled,
)
from torchquorum.worker.ps_channels import PsChannels


def statuses(ps: PsTasks, *bodies: dict[str, Any]) -> PsChannels:
    """Ps task 0 answers with these, the last one for ever."""
    left = list(bodies)

    def answer(_: int, message: m.Message) -> list[m.Message]:
        return [m.Status(left.pop(0) if len(left) > 1 else left[0])] if isinstance(message, m.StatusRequest) else []

    ps.answer = answer
    return PsChannels(ps.end)


@pytest.mark.parametrize(
    ("elastic", "body"),
    [
        (False, {"live": [0, 1]}),
        (False, {"live": [1], "joined": 2}),
        (False, {"live": [1], "stopped": True}),
        (False, {"live": [1], "global_step": 4}),
        (True, {"live": [1], "updates": 1}),
    ],
)
def test_workers_are_waited_for_until_they_are_there_or_the_run_goes_on(elastic: bool, body: dict[str, Any]) -> None:
    ps = PsTasks()
    channels = statuses(ps, {"live": [1], "global_step": 3}, body)
    wait_for_workers(channels, 2, version=3, begins=elastic)
    assert len(ps.sent()) == 2


def test_one_worker_waits_for_nobody() -> None:
    ps = PsTasks()
    wait_for_workers(statuses(ps, {}), 1, version=0, begins=False)
    assert ps.sent() == []


def test_workers_that_do_not_come_are_named_by_their_number_and_said_every_few_seconds() -> None:
    ps = PsTasks()
    channels = statuses(ps, {"live": [1], "updates": 1})
    with pytest.raises(DeadlineError, match=r"waited 60 s for 2 workers and gave up; 1 have joined\. Start the others"):
        wait_for_workers(channels, 2, version=0, begins=False)
    assert ps.said[0] == "/job:worker/task:1: waiting for 2 workers, 1 have joined: 5 s" and len(ps.said) >= 10
    assert WORKERS_S == 120.0


def test_a_worker_that_comes_back_goes_on_without_the_others_after_a_while() -> None:
    ps = PsTasks()
    channels = statuses(ps, {"live": [1]})
    began = ps.clock.now()
    wait_for_workers(channels, 2, version=0, begins=False, at_most_s=3.0)
    assert 3.0 < ps.clock.now() - began < 4.0


def saving(ps: PsTasks, *states: str) -> PsChannels:
    left = list(states)

    def answer(k: int, message: m.Message) -> list[m.Message]:
        if isinstance(message, m.Save):
            return [m.SaveState(message.number, left.pop(0) if len(left) > 1 else left[0], 5, "run/5", "")]
        return [m.Status({})] if isinstance(message, m.StatusRequest) else []

    ps.answer = answer
    return PsChannels(ps.end)


SAVE = m.Save(1, 7, 33, "run", 5)


def test_a_checkpoint_is_waited_for_at_every_ps_task() -> None:
    ps = PsTasks(2)
    assert wait_for_save(saving(ps, "running", "running", "done"), SAVE, 30.0).path == "run/5"
    assert ps.sent(0) == [SAVE] * 3 and ps.sent(1) == [m.StatusRequest()] * 2


def test_a_ps_task_that_is_gone_ends_the_wait_for_a_checkpoint() -> None:
    ps = PsTasks(2)
    channels = saving(ps, "running")
    both, ps.channels[1].closed = ps.answer, True
    ps.answer = lambda k, message: both(k, message) if k == 0 else []
    with pytest.raises(TaskLostError, match=r"/job:ps/task:1 .* waited for its part of a checkpoint"):
        wait_for_save(channels, SAVE, 30.0)


def test_a_checkpoint_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(DeadlineError, match=r"to write a checkpoint into run and gave up"):
        wait_for_save(saving(PsTasks(), "running"), SAVE, 30.0)


def test_the_folder_is_settled_when_nothing_is_being_published() -> None:
    ps = PsTasks()
    answers = iter([False, False, True])
    ps.answer = lambda _k, message: [m.Settled(next(answers))] if isinstance(message, m.Settle) else []
    wait_until_settled(PsChannels(ps.end))
    assert len(ps.sent()) == 3


def test_a_publication_that_does_not_end_is_given_up() -> None:
    ps = PsTasks()
    ps.answer = lambda _k, _message: [m.Settled(False)]
    with pytest.raises(DeadlineError, match="see whether its disk still answers"):
        wait_until_settled(PsChannels(ps.end))
    assert ps.said[0] == "/job:worker/task:1: waiting for a checkpoint that is being published: 5 s"


def heard(index: int, seen: float, life: str) -> dict[str, Any]:
    return {"heard": {str(index): [seen, life]}}


@pytest.mark.parametrize("body", [{}, {"heard": {}}, heard(1, 5.0, "mine"), heard(0, 5.0, "another")])
def test_a_place_in_which_nobody_else_is_heard_is_free(body: dict[str, Any]) -> None:
    ps = PsTasks()
    wait_for_place(statuses(ps, body), "mine")
    assert len(ps.sent()) == 1


def test_the_end_of_another_process_in_this_place_is_waited_for() -> None:
    ps = PsTasks()
    wait_for_place(statuses(ps, heard(1, 5.0, "other"), heard(1, 6.0, "other"), {"heard": {}}), "mine")
    assert len(ps.sent()) == 3


def test_one_that_is_silent_is_not_waited_for_until_it_counts_as_dead() -> None:
    ps = PsTasks()
    before = ps.end.clock.now()
    wait_for_place(statuses(ps, heard(1, 5.0, "other")), "mine")
    assert SILENT_S < ps.end.clock.now() - before < SILENT_S + 2.0


def test_one_that_stays_is_an_error_that_says_what_to_do() -> None:
    ps = PsTasks()
    beats = [heard(1, float(k), "other") for k in range(1000)]
    with pytest.raises(
        DeadlineError, match=r"another process is at work as /job:worker/task:1 .*give other --ps_hosts"
    ):
        wait_for_place(statuses(ps, *beats), "mine")
