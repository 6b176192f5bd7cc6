"""What workers give to be assigned is kept until the log says whose counts."""

import torch

from torchquorum.server.given_values import Given, GivenValues


def given(value: float) -> Given:
    return Given([0], torch.tensor([value]))


def test_what_a_worker_gave_is_there_when_the_log_comes_to_it_though_another_has_given_since() -> None:
    values = GivenValues()
    values.keep((0, 7, 1), given(1.0))
    values.keep((1, 8, 1), given(2.0))  # one that stood in for the chief, and does not know yet that it is back
    assert values.has((0, 7, 1), [0], state=False)
    assert values.take((0, 7, 1)).values.tolist() == [1.0]
    assert values.take((1, 8, 1)).values.tolist() == [2.0]


def test_of_one_worker_the_last_counts() -> None:
    values = GivenValues()
    values.keep((0, 7, 1), given(1.0))
    values.keep((0, 7, 2), given(2.0))
    assert not values.has((0, 7, 1), [0], state=False)
    assert values.has((0, 7, 2), [0], state=False) and not values.has((0, 7, 2), [0], state=True)
    assert values.take((0, 7, 2)).values.tolist() == [2.0]
    assert values.has((0, 7, 2), [0], state=False)  # asked for again, when it has been made
