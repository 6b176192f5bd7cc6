"""The sampler made from a task: every row once, in DistributedSampler's order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import torchquorum as tq
from torchquorum.data.sampler import samplers_of


@dataclass
class Place:
    index: int
    num_workers: int


@pytest.mark.parametrize("rows", [12, 13, 1, 0])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_parts_have_every_row_once_and_a_length_that_is_true(rows: int, workers: int) -> None:
    samplers = [tq.data.Sampler(range(rows), Place(i, workers)) for i in range(workers)]
    parts = [list(sampler) for sampler in samplers]
    assert sorted(row for part in parts for row in part) == list(range(rows))
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_where_it_divides_evenly_the_order_is_that_of_torchs_sampler() -> None:
    ours = tq.data.Sampler(range(12), Place(1, 3), seed=4)
    theirs = DistributedSampler(range(12), num_replicas=3, rank=1, seed=4)  # pyright: ignore[reportArgumentType]
    for epoch in range(3):
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)


def test_drop_last_leaves_out_what_does_not_give_everybody_one() -> None:
    samplers = [tq.data.Sampler(range(11), Place(i, 4), drop_last=True) for i in range(4)]
    assert [len(list(s)) for s in samplers] == [2] * 4 == [len(s) for s in samplers]


def test_a_part_can_change_and_be_nothing() -> None:
    task = Place(1, 2)
    sampler = tq.data.Sampler(range(10), task, shuffle=False)
    loader = DataLoader(range(10), batch_size=2, sampler=sampler)  # pyright: ignore[reportArgumentType]
    assert len(loader) == 3
    sampler.divide(None, 1)
    assert list(loader) == [] and len(loader) == 0
    sampler.divide(0, 1)
    assert list(sampler) == list(range(10))
    assert samplers_of(task) == [sampler] and samplers_of(Place(1, 2)) == []


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_stream_and_something_that_is_no_task_are_refused_in_words() -> None:
    with pytest.raises(tq.TorchQuorumError, match="a stream is divided by the program"):
        tq.data.Sampler(Stream(), Place(0, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(tq.TorchQuorumError, match=r"the task that tq\.join\(\) returned"):
        tq.data.Sampler(range(3), 2)  # pyright: ignore[reportArgumentType]
