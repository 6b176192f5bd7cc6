"""What rows begin with."""

import numpy as np
import pytest
import torch

from torchquorum.errors import ConfigError
from torchquorum.update.row_inits import check_init, initial_rows

KEYS = np.arange(-3000, 3000, dtype=np.int64) * 977


def test_a_row_depends_on_seed_and_key_alone() -> None:
    whole = initial_rows("normal", {"mean": 0.0, "std": 1.0}, 5, KEYS, 7)
    for some in (KEYS[::-1], KEYS[100:200], KEYS[5:6]):
        found = initial_rows("normal", {"mean": 0.0, "std": 1.0}, 5, some.copy(), 7)
        assert torch.equal(found, whole[torch.from_numpy(np.searchsorted(KEYS, some))])
    assert not torch.equal(initial_rows("normal", {"mean": 0.0, "std": 1.0}, 6, KEYS, 7), whole)


def test_the_numbers_are_spread_as_the_name_says() -> None:
    normal = initial_rows("normal", {"mean": 1.0, "std": 2.0}, 0, KEYS, 16)
    assert abs(normal.mean() - 1) < 0.03 and abs(normal.std() - 2) < 0.03
    assert abs(torch.corrcoef(normal.T) - torch.eye(16)).max() < 0.06
    uniform = initial_rows("uniform", {"low": -1.0, "high": 3.0}, 0, KEYS, 16)
    assert uniform.min() >= -1 and uniform.max() <= 3 and abs(uniform.mean() - 1) < 0.03
    counts = torch.histc(uniform, 8, -1, 3) / uniform.numel()
    assert abs(counts - 1 / 8).max() < 0.01
    assert initial_rows("constant", {"value": 0.5}, 0, KEYS[:2], 3).tolist() == [[0.5] * 3] * 2
    assert not initial_rows("zeros", {}, 0, KEYS, 3).any()


def test_an_init_is_checked() -> None:
    assert check_init("uniform", {"high": 1}) == {"low": -0.05, "high": 1.0}
    with pytest.raises(ConfigError, match="allowed are zeros"):
        check_init("xavier", {})
    with pytest.raises(ConfigError, match="normal.sigma"):
        check_init("normal", {"sigma": 1.0})
