"""What the exit codes of tasks mean: who is started again, what ends a run, and the launcher's own exit code. Pure.

Used by `launched` for every launcher. docs/faults.md has the same as a table. What always holds: the same codes mean the same under
every launcher; a program that failed is not started again, as it would fail again; one that a signal ended is.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from enum import Enum

from torchquorum.cluster import TaskId

FAILED = 1
INTERRUPTED = 130


class How(Enum):
    """How a task stands, by its exit code."""

    RUNNING = "running"
    DONE = "done"  # 0
    INTERRUPTED = "interrupted"  # 130: Ctrl-C or SIGTERM has ended it in good order
    FAILED = "failed"  # any other code; also an uncaught KeyboardInterrupt, with which Python ends by SIGINT
    KILLED = "killed"  # any other signal


def read_code(code: int | None) -> How:
    """Returns how a task stands whose process has this exit code, negative for a signal, or None while it runs."""
    if code is None:
        return How.RUNNING
    if code in (0, INTERRUPTED):
        return How.DONE if code == 0 else How.INTERRUPTED
    return How.FAILED if code > 0 or code == -signal.SIGINT else How.KILLED


Ends = dict[TaskId, How]


def may_return(dead: TaskId, ends: Ends, *, elastic: bool) -> bool:
    """Whether the run still has work for a task that a signal ended."""
    chief = ends.get(TaskId("worker", 0), How.RUNNING)
    if chief is How.FAILED and dead.job == "ps":
        return False  # nobody would create its variables
    workers = [how for task, how in ends.items() if task.job == "worker"]
    if elastic:
        return chief not in (How.DONE, How.INTERRUPTED)
    return dead.job == "ps" or How.DONE not in workers


def exit_code(ends: Ends) -> int:
    """Returns the launcher's exit code when all tasks have ended: 0 if the run reached its end, and that is saved."""
    chief = ends.get(TaskId("worker", 0))
    ps = [how for task, how in ends.items() if task.job == "ps"]
    workers = [how for task, how in ends.items() if task.job == "worker"]
    if How.FAILED in workers or any(how is not How.DONE for how in ps):
        return FAILED
    if chief is How.INTERRUPTED:
        return INTERRUPTED  # it has stopped the run for all
    return 0 if not _all_are(workers, How.KILLED) else FAILED


def _all_are(ends: Iterable[How], how: How) -> bool:
    return all(end is how for end in ends)
