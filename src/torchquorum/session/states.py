"""The states of a session and the transitions between them: one enum, one table, one place that changes the state."""

from __future__ import annotations

from enum import StrEnum

from torchquorum.errors import ConfigError


class SessionState(StrEnum):
    """Where a session stands."""

    NEW = "new"  # constructed, not entered
    CONNECTING = "connecting"  # greeting the ps tasks
    CREATING = "creating"  # the chief restores or initializes the variables
    WAITING = "waiting"  # for the chief to have done that
    RUNNING = "running"  # the loop may train
    RECOVERING = "recovering"  # a ps task was lost: attaching again
    STOPPING = "stopping"  # the loop is over: hooks end, the last checkpoint is made
    CLOSED = "closed"  # left, nothing is open any more
    FAILED = "failed"  # ended by an exception, nothing is open any more


_S = SessionState
NEXT: dict[SessionState, frozenset[SessionState]] = {
    _S.NEW: frozenset({_S.CONNECTING, _S.FAILED}),
    _S.CONNECTING: frozenset({_S.CREATING, _S.WAITING, _S.CONNECTING, _S.FAILED}),
    _S.CREATING: frozenset({_S.WAITING, _S.CONNECTING, _S.FAILED}),
    _S.WAITING: frozenset({_S.RUNNING, _S.CONNECTING, _S.FAILED}),
    _S.RUNNING: frozenset({_S.STOPPING, _S.RECOVERING, _S.FAILED}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.STOPPING, _S.FAILED}),
    _S.STOPPING: frozenset({_S.CLOSED, _S.RECOVERING, _S.FAILED}),
    _S.CLOSED: frozenset(),
    _S.FAILED: frozenset(),
}


class StateMachine:
    """The state of one session. `state` may be read on any thread; only the loop's thread changes it."""

    def __init__(self) -> None:
        self.state = SessionState.NEW

    def begin(self) -> None:
        """Enters the session, which can be done once."""
        if self.state is not SessionState.NEW:
            raise ConfigError("this session has begun already; make a new tq.Session for another run")
        self.go(SessionState.CONNECTING)

    def go(self, state: SessionState) -> None:
        """The only place where the state changes."""
        assert state in NEXT[self.state], f"a session cannot go from {self.state} to {state}"
        self.state = state
