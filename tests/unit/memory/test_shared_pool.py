"""Pieces of a shared segment."""

import gc

import numpy as np
import pytest
import torch

from torchquorum.memory.shared_pool import PoolOfOther, SharedPool, rows_behind


def test_pieces_that_are_taken_never_overlap() -> None:
    pool, rng, taken = SharedPool("test", 1 << 16), np.random.default_rng(0), dict[int, tuple[int, int]]()
    for number in range(2000):
        if rng.random() < 0.5 or not taken:
            size = int(rng.integers(1, 6000))
            if (at := pool.take(size)) is not None:
                assert at % 64 == 0 and at + size <= 1 << 16
                pool.bytes(at, size).fill_(number % 251)
                taken[at] = size, number % 251
        else:
            at = int(rng.choice(list(taken)))
            size, value = taken.pop(at)
            assert bool((pool.bytes(at, size) == value).all())
            pool.give(at)
    for at in taken:
        pool.give(at)
    assert pool.take(1 << 16) == 0, "all of it is one piece again"
    assert pool.take(1) is None
    pool.close()


def test_a_lent_piece_comes_back_with_the_last_tensor_on_it() -> None:
    pool = SharedPool("test", 4096)
    at = pool.take(4096)
    assert at == 0
    rows = pool.lend(at, 64, 256).view(torch.float32)
    part = rows.view(8, 8)[3]
    del rows
    gc.collect()
    assert pool.take(64) is None
    del part
    gc.collect()
    assert pool.take(4096) == 0
    pool.close()


def test_another_process_sees_the_same_memory_and_nothing_beyond_it() -> None:
    pool = SharedPool("test", 4096)
    other = PoolOfOther(pool.ref)
    other.bytes(128, 8).view(torch.int64).fill_(7)
    assert pool.bytes(128, 8).view(torch.int64).item() == 7
    for at, size in ((-64, 8), (8, 8), (4096, 1), (0, 4097), (0, -1)):
        with pytest.raises(ValueError, match="are not all in a segment"):
            other.bytes(at, size)
    pool.close()


def test_rows_lie_behind_their_keys() -> None:
    assert rows_behind(128, 0, 64) == (128, 0)
    assert rows_behind(128, 1, 64) == (192, 64)
    assert rows_behind(0, 9, 20) == (128, 180)


def test_a_piece_of_which_nothing_is_lent_is_given_back_at_once() -> None:
    pool = SharedPool("tq-test", 4096)
    at = pool.take(64)
    assert at is not None and pool.lend(at, at + 64, 0).view(torch.float64).shape == (0,)
    assert pool.take(4096) == at, "all of it is free again"
    pool.close()
