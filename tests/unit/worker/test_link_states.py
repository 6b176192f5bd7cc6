"""The states of a link: which steps there are, and that there are no others."""

import pytest

from torchquorum.worker.link_states import NEXT, LinkState, LinkStates

LIFE = [LinkState.GREETED, LinkState.AWAITING, LinkState.IDLE, LinkState.AWAITING, LinkState.IDLE, LinkState.CLOSED]


def test_a_whole_life() -> None:
    states = LinkStates()
    for then in LIFE:
        states.set(then)
        assert states.now is then


@pytest.mark.parametrize(
    ("path", "then"),
    [
        ([], LinkState.AWAITING),
        ([], LinkState.IDLE),
        (LIFE[:1], LinkState.IDLE),
        (LIFE[:3], LinkState.GREETED),
        (LIFE, LinkState.AWAITING),
        (LIFE, LinkState.NEW),
    ],
)
def test_a_step_that_is_not_in_the_table_is_a_mistake_of_ours(path: list[LinkState], then: LinkState) -> None:
    states = LinkStates()
    for each in path:
        states.set(each)
    with pytest.raises(AssertionError, match="a link cannot go from"):
        states.set(then)


def test_a_link_can_be_closed_from_anywhere_and_twice() -> None:
    assert set(NEXT) == set(LinkState)
    assert all(LinkState.CLOSED in then for then in NEXT.values())
