"""Keys as gaps."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchquorum.wire.key_frames import pack_keys, unpack_keys

ANY = st.integers(-(1 << 63) + 1, (1 << 63) - 1)


@settings(max_examples=150, deadline=None)
@given(st.sets(ANY | st.integers(-300, 300) | st.integers((1 << 32) - 3, (1 << 32) + 70_000), max_size=300))
def test_keys_come_back(chosen: set[int]) -> None:
    keys = np.array(sorted(chosen), np.int64)
    frame = pack_keys(keys)
    assert unpack_keys(frame, len(keys)).tolist() == keys.tolist()
    assert len(frame) <= 8 * len(keys) + 9


@pytest.mark.parametrize("gap", [(1 << 8 * w) - 1 + more for w in range(1, 8) for more in (-1, 0, 1)])
def test_gaps_at_the_border_of_a_width_come_back(gap: int) -> None:
    keys = np.cumsum(np.array([-5, gap, 1, gap, 3], np.int64))
    assert unpack_keys(pack_keys(keys), 5).tolist() == keys.tolist()


def test_keys_of_several_features_take_little_more_than_two_bytes() -> None:
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(0, 200_000, 23_000) + (rng.integers(0, 26, 23_000) << 32))
    assert len(pack_keys(keys)) < 2.2 * len(keys)


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 4, 1 << 40])
def test_another_number_of_keys_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="are no"):
        unpack_keys(pack_keys(np.array([1, 2, 1 << 40], np.int64)), count)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 8))
def test_any_bytes_are_keys_or_an_error(data: bytes, count: int) -> None:
    with suppress(ValueError):
        assert len(unpack_keys(data, count)) == count
