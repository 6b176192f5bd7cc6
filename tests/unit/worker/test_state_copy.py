"""What a program does with the copy of a state that it was given."""

import copy
import pickle

import pytest
import torch

from torchquorum.errors import ConfigError
from torchquorum.worker.state_copy import GivenStates, StateCopy, StateElsewhere

P, Q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))


def given() -> tuple[GivenStates, StateCopy]:
    states = GivenStates()
    state = {"step": torch.tensor(4.0), "exp_avg": torch.ones(3, dtype=torch.bfloat16), "count": 3}
    return states, states.give(7, {P: state}, {P: "p", Q: "q"})


def test_it_reads_as_the_state_of_torch_does() -> None:
    states, state = given()
    assert state[P]["count"] == 3 and len(state) == 1 and len(state[Q]) == 0
    assert states.at(7) is state and states.at(8) is None
    with pytest.raises(KeyError):
        state[P]["exp_avg_sq"]
    states.look()
    assert states.at(7) is None


def test_copies_are_plain_and_may_be_written_to() -> None:
    states, state = given()
    for made in (copy.deepcopy(state), pickle.loads(pickle.dumps(dict(state)))):
        [own] = made.values()
        own["exp_avg"].zero_()
        own["more"] = 1
        assert not state[P]["exp_avg"].eq(0).all()
    states.look()  # and no error: nobody has written to the state itself


@pytest.mark.parametrize(
    "write",
    [
        lambda state: state[P]["exp_avg"].zero_(),
        lambda state: state[P]["exp_avg"].data.zero_(),
        lambda state: state[P]["step"].fill_(0.0),
    ],
)
def test_a_write_is_an_error_at_the_next_step_and_only_there(write: object) -> None:
    states, state = given()
    assert callable(write)
    write(state)
    del state
    with pytest.raises(ConfigError, match=r"(exp_avg|step) of p in optimizer.state: written to.*load_state_dict"):
        states.look()
    states.look()


def test_what_the_program_still_has_is_looked_at_further() -> None:
    states, state = given()
    kept = state[P]["exp_avg"]
    del state
    states.look()
    states.look()
    kept.mul_(2)
    del kept
    assert states.written() == "exp_avg of p" and states.written() == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.__setitem__(P, {}),
        lambda state: state[P].update(step=0),
        lambda state: state[P].pop("step"),
        lambda state: state.clear(),
    ],
)
def test_what_is_put_into_it_is_refused(change: object) -> None:
    _, state = given()
    assert callable(change)
    with pytest.raises(ConfigError, match="a copy inside a session"):
        change(state)


def test_after_the_session_there_is_none() -> None:
    assert not dict(StateElsewhere())
    with pytest.raises(ConfigError, match="read it inside"):
        StateElsewhere()[P]
