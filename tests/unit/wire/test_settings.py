"""Settings as they travel, and what changes in them."""

from typing import Any

import numpy as np
import pytest
import torch

from torchquorum.errors import ConfigError
from torchquorum.wire.settings import changed, changes, decode, describe, encode, only_rates, with_rates


@pytest.mark.parametrize("value", [None, True, 3, 0.1, "word", (0.9, 0.999), torch.tensor(0.5, dtype=torch.float64)])
def test_what_travels_comes_back_as_it_was(value: Any) -> None:
    there = decode(encode(value))
    assert type(there) is type(value) and there == value
    assert not isinstance(value, torch.Tensor) or there.dtype == value.dtype


def test_numbers_of_numpy_travel_as_plain_ones() -> None:
    assert type(encode(np.float64(0.1))) is float and encode(np.float64(0.1)) == 0.1
    assert encode(np.float32(0.1)) == float(np.float32(0.1)) and type(encode(np.int64(3))) is int


@pytest.mark.parametrize("value", [object(), print, torch.ones(2)])
def test_what_cannot_travel_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="cannot travel to a ps"):
        encode(value)


def test_a_change_has_only_what_is_other_and_brings_one_to_the_other() -> None:
    before, after = [{"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.2}], [{"lr": 0.1, "betas": [0.8, 0.99]}, {"lr": 0.3}]
    change = changes(before, after)
    assert change == [{"betas": [0.8, 0.99]}, {"lr": 0.3}]
    assert changed(before, change) == after
    assert changes(before, before) == [] and changed(before, []) is before


def test_a_change_of_plain_rates_is_told_from_others() -> None:
    assert only_rates([{"lr": 0.3}, {}])
    assert not only_rates([{"lr": 0.3, "momentum": 0.9}]) and not only_rates([{"lr": encode(torch.tensor(0.3))}])


def test_rates_replace_rates_and_equal_ones_change_nothing() -> None:
    settings = [{"lr": 0.1, "momentum": 0.0}]
    assert with_rates(settings, [0.1]) is settings
    assert with_rates(settings, [0.2]) == [{"lr": 0.2, "momentum": 0.0}] and settings[0]["lr"] == 0.1


def test_a_change_is_described_in_words() -> None:
    assert describe([{"lr": 0.05, "betas": [0.9, 0.99]}]) == "lr=0.05, betas=(0.9, 0.99)"
    assert describe([{}, {"lr": 0.05}]) == "group 1: lr=0.05"
    assert describe([{"lr": 1.0}] * 6).endswith("; and 2 groups more")
