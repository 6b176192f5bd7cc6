"""The one table of exit codes: what the codes of the tasks mean for a restart, and for the run."""

import signal

import pytest

from torchquorum.cluster import TaskId
from torchquorum.launcher.outcome import FAILED, INTERRUPTED, How, exit_code, may_return, read_code

CHIEF, OTHER, PS = TaskId("worker", 0), TaskId("worker", 1), TaskId("ps", 0)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (None, How.RUNNING),
        (0, How.DONE),
        (130, How.INTERRUPTED),
        (1, How.FAILED),
        (2, How.FAILED),
        (255, How.FAILED),
        (-signal.SIGINT, How.FAILED),  # an uncaught KeyboardInterrupt
        (-signal.SIGKILL, How.KILLED),
        (-signal.SIGTERM, How.KILLED),
        (-signal.SIGSEGV, How.KILLED),
    ],
)
def test_a_code_says_how_a_task_ended(code: int | None, how: How) -> None:
    assert read_code(code) is how


@pytest.mark.parametrize(
    ("ps", "chief", "other", "code"),
    [
        (How.DONE, How.DONE, How.DONE, 0),
        (How.DONE, How.DONE, How.KILLED, 0),  # the run went on without it
        (How.DONE, How.KILLED, How.DONE, 0),  # ps 0 saved
        (How.DONE, How.DONE, How.INTERRUPTED, 0),  # it was sent away
        (How.DONE, How.INTERRUPTED, How.DONE, INTERRUPTED),  # it has stopped the run, and saved
        (How.DONE, How.DONE, How.FAILED, FAILED),
        (How.DONE, How.FAILED, How.DONE, FAILED),
        (How.FAILED, How.DONE, How.DONE, FAILED),  # not saved
        (How.KILLED, How.DONE, How.DONE, FAILED),
        (How.INTERRUPTED, How.DONE, How.DONE, FAILED),
        (How.DONE, How.KILLED, How.KILLED, FAILED),  # nobody is left who reached the end
        (How.FAILED, How.INTERRUPTED, How.DONE, FAILED),
    ],
)
def test_the_codes_of_the_tasks_make_that_of_the_run(ps: How, chief: How, other: How, code: int) -> None:
    assert exit_code({PS: ps, CHIEF: chief, OTHER: other}) == code


def test_a_task_that_a_signal_ended_comes_back_while_the_run_has_work_for_it() -> None:
    ends = {PS: How.RUNNING, CHIEF: How.RUNNING, OTHER: How.KILLED}
    assert may_return(OTHER, ends, elastic=False)
    assert may_return(OTHER, {**ends, TaskId("worker", 2): How.FAILED}, elastic=False), "the others go on"
    assert not may_return(OTHER, {**ends, CHIEF: How.DONE}, elastic=False), "the run is over"
    assert may_return(PS, {**ends, PS: How.KILLED, OTHER: How.FAILED}, elastic=False)
    assert not may_return(PS, {**ends, PS: How.KILLED, CHIEF: How.FAILED}, elastic=False), (
        "nobody creates its variables"
    )
    assert may_return(OTHER, {**ends, TaskId("worker", 2): How.DONE}, elastic=True), "it was sent away"
    assert not may_return(OTHER, {**ends, CHIEF: How.DONE}, elastic=True)
