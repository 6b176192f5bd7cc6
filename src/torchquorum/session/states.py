"""The states of a session and the steps between them: one enum, one table, one place that changes it."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a session stands."""

    NEW = "new"  # made, not begun
    CONNECTING = "connecting"  # greeting the ps tasks
    CREATING = "creating"  # the chief restores or initialises the variables
    WAITING = "waiting"  # for the chief to have done that
    RUNNING = "running"  # the loop may train
    RECOVERING = "recovering"  # a ps task was lost: finding it again
    STOPPING = "stopping"  # the loop is over: hooks end, the last checkpoint is made
    CLOSED = "closed"  # left, nothing is open any more
    FAILED = "failed"  # ended by an exception, nothing is open any more


NEXT: dict[State, frozenset[State]] = {
    State.NEW: frozenset({State.CONNECTING, State.FAILED}),
    State.CONNECTING: frozenset({State.CREATING, State.WAITING, State.CONNECTING, State.FAILED}),
    State.CREATING: frozenset({State.WAITING, State.CONNECTING, State.FAILED}),
    State.WAITING: frozenset({State.RUNNING, State.CONNECTING, State.FAILED}),
    State.RUNNING: frozenset({State.STOPPING, State.RECOVERING, State.FAILED}),
    State.RECOVERING: frozenset({State.RUNNING, State.STOPPING, State.FAILED}),
    State.STOPPING: frozenset({State.CLOSED, State.RECOVERING, State.FAILED}),
    State.CLOSED: frozenset(),
    State.FAILED: frozenset(),
}


def check_step(now: State, then: State) -> State:
    """Returns `then` if a session may go there from `now`."""
    assert then in NEXT[now], f"a session cannot go from {now} to {then}"
    return then
