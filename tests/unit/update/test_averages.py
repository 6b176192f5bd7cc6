"""Moving averages, as TensorFlow computes them; tests/equivalence/test_golden.py has real vectors."""

import numpy as np
import pytest
import torch

from torchquorum.errors import ConfigError
from torchquorum.update.averages import Averages
from torchquorum.wire.messages import AverageSpec


def test_a_shadow_begins_as_its_variable_and_follows_it() -> None:
    averages = Averages(AverageSpec(0.75, False), [torch.tensor([4.0])])
    averages.follow([torch.tensor([8.0])], 1)
    assert averages.shadows[0].tolist() == [5.0]
    averages.follow([torch.tensor([8.0])], 2)
    assert averages.shadows[0].tolist() == [5.75]


def test_with_num_updates_the_decay_begins_small_and_ends_at_what_was_given() -> None:
    averages = Averages(AverageSpec(0.99, True), [torch.zeros(1)])
    assert averages.rate(0) == float(np.float32(1) - np.float32(0.1))
    assert averages.rate(10**6) == float(np.float32(1) - np.float32(0.99))


def test_a_shadow_has_the_precision_of_its_variable_and_memory_of_its_own() -> None:
    value = torch.ones(2, dtype=torch.float64)
    averages = Averages(AverageSpec(0.5, False), [value])
    value.fill_(3.0)
    assert averages.shadows[0].tolist() == [1.0, 1.0] and averages.shadows[0].dtype == torch.float64


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_that_makes_no_sense_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        Averages(AverageSpec(decay, False), [torch.zeros(1)])
