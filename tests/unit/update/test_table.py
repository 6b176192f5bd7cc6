"""One shard's part of a table."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchquorum.update.row_inits import initial_rows
from torchquorum.update.row_kernels import KERNELS
from torchquorum.update.table import RowMoment, TablePart, mean_rows
from torchquorum.update.table_keys import shard_of
from torchquorum.wire.plan import InitSpec, TableSpec

OPTIONS = KERNELS["Adagrad"].options({"lr": 0.1})


def make(shard: int = 0, num_shards: int = 1, **changes: Any) -> TablePart:
    spec = TableSpec(name="items", dim=4, optimizer="Adagrad", init=InitSpec("uniform", {"low": -1, "high": 1}))
    for name, value in changes.items():
        setattr(spec, name, value)
    table = TablePart(spec, shard, num_shards)
    table.begin(OPTIONS)
    return table


def keys(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def rows_of(table: TablePart) -> tuple[Any, dict[str, torch.Tensor], Any]:
    chunks = [chunk for chunk in table.snapshot().chunks() if "keys" in chunk]
    found = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    keys, stamps = found.pop("keys"), found.pop("versions")
    return keys, {name: torch.from_numpy(values) for name, values in found.items()}, stamps


def touch(table: TablePart, version: int, *values: int) -> None:
    table.apply(keys(*values), torch.ones(len(values), 4), RowMoment(version, OPTIONS))


def test_a_row_that_was_never_updated_is_what_it_begins_with_and_costs_nothing() -> None:
    table = make()
    rows = table.gather(keys(3, -7, 1 << 60))
    assert torch.equal(rows, initial_rows("uniform", {"low": -1, "high": 1}, 0, keys(3, -7, 1 << 60), 4))
    assert table.size == 0
    touch(table, 1, -7)
    again = table.gather(keys(3, -7, 1 << 60))
    assert torch.equal(again[[0, 2]], rows[[0, 2]]) and not torch.equal(again[1], rows[1])
    assert (table.size, table.pulled, table.found) == (1, 6, 1)


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("rows", [0, 500])
def test_shards_have_together_what_one_has(num_shards: int, rows: int) -> None:
    whole = make(rows=rows, is_fixed=rows > 0)
    parts = [make(k, num_shards, rows=rows, is_fixed=rows > 0) for k in range(num_shards)]
    rng = np.random.default_rng(0)
    first = torch.randn(500, 4)
    if rows:
        for table in (whole, *parts):
            table.load(np.arange(500, dtype=np.int64), {"rows": first})
    for version in range(1, 20):
        chosen = np.unique(rng.integers(0, 500, 60))
        gradient = torch.from_numpy(rng.normal(size=(len(chosen), 4)).astype(np.float32))
        whole.apply(chosen, gradient, RowMoment(version, OPTIONS))
        shards = shard_of(chosen, num_shards)
        for k, part in enumerate(parts):
            mine = shards == k
            part.apply(chosen[mine], gradient[torch.from_numpy(mine)], RowMoment(version, OPTIONS))
    every = np.arange(500, dtype=np.int64)
    shards = shard_of(every, num_shards)
    for k, part in enumerate(parts):
        assert torch.equal(part.gather(every[shards == k]), whole.gather(every[shards == k]))
    assert sum(part.size for part in parts) == whole.size


@pytest.mark.parametrize("step", [1, 2, 1000, 1 << 20])
def test_keys_of_any_pattern_are_spread_evenly(step: int) -> None:
    counts = np.bincount(shard_of(np.arange(30_000, dtype=np.int64) * step, 3), minlength=3)
    assert counts.min() > 9_700


def test_a_key_gets_a_row_after_so_many_sightings() -> None:
    table = make(admit=3)
    begins = table.gather(keys(1, 2))
    touch(table, 1, 1, 2)
    touch(table, 2, 1)
    assert table.size == 0 and torch.equal(table.gather(keys(1, 2)), begins)
    touch(table, 3, 1)
    assert table.size == 1
    found = table.gather(keys(1, 2))
    assert not torch.equal(found[0], begins[0]) and torch.equal(found[1], begins[1])


def test_rows_go_when_they_have_not_been_updated_for_so_many_steps() -> None:
    table = make(ttl_steps=3)
    for version in range(1, 5):
        touch(table, version, 100, version)
    assert table.evict(4, 0.0) == 0
    touch(table, 5, 100)
    assert table.evict(5, 0.0) == 1 and table.age.told.tolist() == [1]
    assert sorted(rows_of(table)[0].tolist()) == [2, 3, 4, 100]
    assert torch.equal(table.gather(keys(1)), make().gather(keys(1)))


def test_rows_go_when_they_have_not_been_updated_for_so_many_seconds() -> None:
    table = make(ttl_s=10.0)
    touch(table, 1, 1)
    table.evict(1, 100.0)
    touch(table, 2, 2)
    assert table.evict(2, 109.0) == 0
    assert table.evict(2, 110.0) == 1 and table.age.told.tolist() == [1]
    assert table.evict(2, 119.5) == 1 and table.age.told.tolist() == [1, 2]


def test_the_least_recently_updated_go_when_there_are_too_many() -> None:
    table = make(capacity=4)
    for version, key in enumerate((5, 6, 7, 8, 5, 9), 1):
        touch(table, version, key)
        table.evict(version, 0.0)
    assert table.age.told.tolist() == [6] and table.size == 4
    touch(table, 7, 1, 2, 3)
    assert table.evict(7, 0.0) == 3 and table.age.told.tolist() == [6, 7, 8, 5]


def test_ages_are_looked_at_sixteen_times_in_a_life_also_where_every_update_asks() -> None:
    table = make(ttl_s=16.0, capacity=1000)
    for version in range(1, 400):
        touch(table, version, version % 7 + 10 * (version > 200))
        table.evict(version, version / 10)
    assert len(table.age.scalars()["marks"]) < 20
    assert table.size == 7 and sorted(table.age.told.tolist()) == list(range(7))


def test_the_keys_that_went_last_are_told() -> None:
    table = make(capacity=64)
    for version in range(1, 3000):
        touch(table, version, *range(100 * version, 100 * version + 100))
        table.evict(version, 0.0)
    told = table.age.told
    assert len(told) == 100_000 and (np.diff(told[:-64]) > 0).mean() > 0.9 and told[-1] > 100 * 2990


def test_keys_without_a_row_are_forgotten_like_rows() -> None:
    table = make(admit=3, ttl_steps=32)
    touch(table, 1, 5, 6)
    touch(table, 2, 5)
    table.evict(40, 0.0)
    assert len(table.sightings) == 0
    touch(table, 41, 5)
    assert table.size == 0, "its sightings began anew"
    crowded = make(admit=2, capacity=200)
    for version in range(1, 100):
        touch(crowded, version, *range(100 * version, 100 * version + 100))
        crowded.evict(version, 0.0)
    assert crowded.size == 0 and 100 <= len(crowded.sightings) <= 200


def test_the_place_of_a_row_that_went_is_used_again() -> None:
    table = make(capacity=64)
    for version in range(1, 400):
        touch(table, version, version, 10_000 + version)
        table.evict(version, 0.0)
    assert table.size == 63
    assert len(table.values.array) > 200 and table.keys.end <= 66
    fresh = make()
    touch(fresh, 399, 399)
    assert torch.equal(table.gather(keys(399)), fresh.gather(keys(399)))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_table_comes_back_from_its_chunks(num_shards: int) -> None:
    table = make(admit=2, capacity=300)
    rng = np.random.default_rng(0)
    for version in range(1, 60):
        chosen = np.unique(rng.integers(0, 500, 40))
        table.apply(
            chosen, torch.from_numpy(rng.normal(size=(len(chosen), 4)).astype(np.float32)), RowMoment(version, OPTIONS)
        )
        table.evict(version, 0.0)
    again = [make(k, num_shards, admit=2, capacity=300) for k in range(num_shards)]
    for part in again:
        found, columns, stamps = rows_of(table)
        part.load(found, columns, stamps)
        part.load_sightings(*table.sightings.all())
        part.restore([table.scalars()])
    every = np.arange(500, dtype=np.int64)
    shards = shard_of(every, num_shards)
    gradient = torch.randn(500, 4)
    table.apply(every, gradient, RowMoment(60, OPTIONS))
    for k, part in enumerate(again):
        mine = shards == k
        part.apply(every[mine], gradient[torch.from_numpy(mine)], RowMoment(60, OPTIONS))
        assert torch.equal(part.gather(every[mine]), table.gather(every[mine]))


def test_a_delta_has_the_rows_updated_since_and_the_keys_that_went() -> None:
    table = make(capacity=4)
    touch(table, 1, 1, 2, 3)
    table.snapshot()
    touch(table, 2, 3, 4, 5)
    table.evict(2, 0.0)
    delta = table.snapshot(since=1)
    chunks = list(delta.chunks())
    assert chunks[0]["removed"].tolist() == [1]
    assert sorted(np.concatenate([c["keys"] for c in chunks[1:]]).tolist()) == [3, 4, 5]


def test_a_snapshot_is_the_table_as_it_was_while_that_goes_on() -> None:
    table = make(capacity=2000)
    every = np.arange(1500, dtype=np.int64)
    table.apply(every, torch.randn(1500, 4), RowMoment(1, OPTIONS))
    expected = table.gather(every).clone()
    snapshot, found = table.snapshot(), dict[int, torch.Tensor]()
    table.apply(every[::3], torch.randn(500, 4), RowMoment(2, OPTIONS))
    reading = snapshot.chunks()
    for version in range(3, 30):  # rows change, go and come while it is read
        if version % 2 and (chunk := next(reading, None)) is not None:
            found.update(zip(chunk["keys"].tolist(), torch.from_numpy(chunk["rows"]), strict=True))
        chosen = np.arange(100 * version, 100 * version + 900, dtype=np.int64)
        table.apply(chosen, torch.randn(900, 4), RowMoment(version, OPTIONS))
        table.evict(version, 0.0)
    assert sorted(found) == every.tolist()
    assert torch.equal(torch.stack([found[key] for key in every.tolist()]), expected)


def test_the_mean_is_over_all_gradients_or_over_those_that_touch_a_row() -> None:
    one = keys(1, 2), torch.tensor([[2.0], [4.0]])
    two = keys(2, 3), torch.tensor([[6.0], [8.0]])
    found, mean, seen = mean_rows([one, two], 2, touching=False)
    assert found.tolist() == [1, 2, 3] and mean.flatten().tolist() == [1.0, 5.0, 4.0] and seen.tolist() == [1, 2, 1]
    found, mean, _ = mean_rows([one, two], 2, touching=True)
    assert mean.flatten().tolist() == [2.0, 5.0, 8.0]
    found, mean, _ = mean_rows([one], 2, touching=False)
    assert mean.flatten().tolist() == [1.0, 2.0]


def test_keys_that_are_not_in_a_fixed_table_are_refused() -> None:
    table = make(rows=10, is_fixed=True)
    with pytest.raises(ValueError, match="from 0 to 9"):
        table.gather(keys(3, 10))
