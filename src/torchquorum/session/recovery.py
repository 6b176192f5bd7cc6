"""After a ps task was lost: how a session finds it again, and where the run then stands.

The session calls this and acts on what comes back: positions, hooks and states are its own. What always holds: it tries until
a deadline and no longer, and a gradient that was on its way is pushed again only where the variables are as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torchquorum.errors import DeadlineError, LostPlaceError, LostVariablesError, TaskLostError
from torchquorum.session.buffers import RunBuffers
from torchquorum.session.join import Task
from torchquorum.worker.client import Client, Step

REJOIN_S = 10.0
TRY_EVERY_S = 0.2


@dataclass(frozen=True)
class Found:
    """What a session has found again."""

    client: Client  # joined
    version: int  # that the run goes on at
    steps_back: int  # how many versions before where it was; 0 where nothing is lost
    taken_up: Step | None  # what became of the gradient that was being pushed, if there was one


def find_again(
    rejoin: Callable[[], Client],
    before: Client,
    buffers: RunBuffers,
    *,
    wait_for_workers: int,
    after_loop: bool,
    shares: bool,
    deadline: float,
) -> Found:
    """Joins again, as often as it takes.

    Args:
        rejoin: Connects and joins, once.
        before: The client that lost its ps task.
        buffers: The session's; taken again where the run is back at a checkpoint.
        wait_for_workers: How many workers trained together.
        after_loop: Whether the loop is over: then no gradient is taken up.
        shares: Whether ps task 0 shares data out: one that was restored knows nothing of batches on their way, so they are
            computed again and no gradient of them is taken up.
        deadline: When to give up, on the monotonic clock.

    Raises:
        TaskLostError, LostPlaceError, DeadlineError: Of the last try, when the deadline is over.
    """
    while True:
        try:
            client = rejoin()
            steps_back = max(0, before.version - client.version)
            if steps_back:
                buffers.begin(client)
            version = client.version
            # Those who trained together go on together: else the first one back would fill their rounds.
            client.wait_for_workers(wait_for_workers, at_most_s=REJOIN_S)
            unknown = shares and client.reign != before.reign
            taken_up = client.take_up(before) if not (steps_back or after_loop or unknown) else None
            return Found(client, version, steps_back, taken_up)
        except (TaskLostError, LostPlaceError, DeadlineError):
            if time.monotonic() > deadline:
                raise
            time.sleep(TRY_EVERY_S)


def check_still_over(task: Task, version: int, last_step: int | None) -> None:
    """A ps was lost after the loop: that is no harm unless the run has lost steps that nobody will make again.

    Raises:
        LostVariablesError: It has.
    """
    if task.is_chief and last_step is not None and version < last_step:
        raise LostVariablesError(
            f"{task}: a ps task was lost after the last step and before the last checkpoint: the run is back at "
            f"global step {version} of {last_step}. Start the program again: it goes on from there."
        )


def lost_at_the_end(error: Exception) -> LostVariablesError:
    """Returns the error of a ps that was lost after the loop and did not come back: it costs the steps not yet saved."""
    return LostVariablesError(
        f"{error} The last step of the run is not saved: when the ps tasks are back, start the program again: it goes on from "
        "the last checkpoint."
    )
