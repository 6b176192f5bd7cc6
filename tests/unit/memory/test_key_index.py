"""The index from keys to positions, against a dict."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchquorum.memory.key_index import KeyIndex, mix

KEYS = st.integers(-(1 << 63) + 1, (1 << 63) - 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(KEYS | st.integers(0, 40), max_size=60)), max_size=12))
def test_it_is_what_a_dict_is(steps: list[tuple[bool, list[int]]]) -> None:
    index, expected, position = KeyIndex(4096), dict[int, int](), 0
    for inserts, given_keys in steps:
        chosen = [k for k in dict.fromkeys(given_keys) if (k in expected) != inserts]
        keys = np.array(chosen, np.int64)
        if inserts:
            index.insert(keys, np.arange(position, position + len(keys)))
            expected.update(zip(chosen, range(position, position + len(keys)), strict=True))
            position += len(keys)
        else:
            index.remove(keys)
            for key in chosen:
                del expected[key]
        asked = np.array([*expected, *given_keys, 5, -5], np.int64)
        assert index.find(asked).tolist() == [expected.get(k, -1) for k in asked.tolist()]
        assert len(index) == len(expected)


@pytest.mark.parametrize("pattern", ["one after the other", "multiples of 4096", "any"])
def test_keys_of_any_pattern_are_found_and_memory_stays_small(pattern: str) -> None:
    rng = np.random.default_rng(1)
    count = 200_000
    keys = np.unique(rng.integers(-(1 << 62), 1 << 62, count))
    if pattern != "any":
        keys = np.arange(count, dtype=np.int64) * (1 if pattern == "one after the other" else 4096)
    index = KeyIndex()
    for start in range(0, len(keys), 7777):
        index.insert(keys[start : start + 7777], np.arange(start, min(start + 7777, len(keys))))
    order = rng.permutation(len(keys))
    assert (index.find(keys[order]) == order).all()
    assert (index.find(keys + (1 << 62) + 1) == -1).all()
    assert index.size_bytes < 32 * len(keys)
    index.remove(keys[::2])
    assert (index.find(keys)[::2] == -1).all()
    assert (index.find(keys)[1::2] == np.arange(len(keys))[1::2]).all()


def test_keys_that_come_and_go_for_long_are_found_as_fast_as_before() -> None:
    rng, index, live = np.random.default_rng(2), KeyIndex(), list[np.ndarray]()
    for _ in range(1500):
        keys = np.unique(rng.integers(-(1 << 62), 1 << 62, 500))
        assert (index.find(keys) == -1).all()
        index.insert(keys, np.arange(len(keys)))
        live.append(keys)
        if len(live) > 40:
            index.remove(live.pop(0))
    for keys in live:
        assert (index.find(keys) == np.arange(len(keys))).all()
    marked = sum(index._overflowed.array[f : f + n].sum() for f, n in zip(index._first, index._buckets, strict=True))
    assert marked < 0.7 * index._buckets.sum()
    assert index.size_bytes < 40 * len(index) + (1 << 17)


def test_a_hash_depends_on_all_bits() -> None:
    keys = np.arange(1000, dtype=np.int64)
    flipped = [np.bitwise_count(mix(keys) ^ mix(keys ^ np.int64(1 << bit))).mean() for bit in range(63)]
    assert min(flipped) > 28 and max(flipped) < 36
    assert not (mix(keys) == mix(keys, 1)).any()
