"""A session can be entered once, and its states follow the table."""

import pytest

from torchquorum.errors import ConfigError
from torchquorum.session.states import NEXT, SessionState, StateMachine


def test_a_session_begins_once() -> None:
    states = StateMachine()
    states.begin()
    assert states.state is SessionState.CONNECTING
    with pytest.raises(ConfigError, match="has begun already; make a new tq.Session"):
        states.begin()


def test_a_transition_that_is_not_in_the_table_is_a_mistake_of_ours() -> None:
    states = StateMachine()
    with pytest.raises(AssertionError, match="cannot go from new to running"):
        states.go(SessionState.RUNNING)
    assert states.state is SessionState.NEW


def test_every_state_but_the_last_two_may_fail() -> None:
    ends = {state for state, following in NEXT.items() if not following}
    assert ends == {SessionState.CLOSED, SessionState.FAILED} and set(NEXT) == set(SessionState)
    assert all(SessionState.FAILED in NEXT[state] for state in set(NEXT) - ends)
