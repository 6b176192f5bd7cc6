"""Batches: which rows each worker gets, in which order, and how a stream goes on where it stopped."""

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchquorum.data import Split
from torchquorum.data.batches import Batches
from torchquorum.errors import ConfigError


def numbered(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A source whose labels are the row numbers and whose inputs repeat them."""
    numbers = torch.arange(rows)
    return numbers.to(torch.float64).view(-1, 1).repeat(1, 3), numbers


def take_rows(batches: Batches, count: int) -> list[list[int]]:
    return [labels.tolist() for _, labels in itertools.islice(batches, count)]


def take_epoch(batches: Batches) -> list[list[int]]:
    return take_rows(batches, batches.steps_per_epoch)


def joined_rows(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def test_inputs_and_labels_of_a_pair_belong_together_and_keep_their_dtype() -> None:
    inputs, labels = next(Batches(numbered(50), 8))
    assert inputs.shape == (8, 3)
    assert inputs.dtype == torch.float64
    assert torch.equal(inputs[:, 1].to(torch.int64), labels)


def test_inputs_of_a_split_are_float32_from_0_to_1() -> None:
    images = torch.arange(40, dtype=torch.uint8).view(-1, 1).repeat(1, 784)
    inputs, labels = next(Batches(Split(images, torch.arange(40)), 8))
    assert torch.equal(inputs[:, 0], labels.to(torch.float32) / 255)
    assert inputs.shape == (8, 784)


def test_bytes_of_a_pair_are_not_scaled() -> None:
    inputs, _ = next(Batches((torch.full((9, 2), 255, dtype=torch.uint8), torch.arange(9)), 3))
    assert inputs.dtype == torch.uint8


def test_an_epoch_visits_every_row_once() -> None:
    rows = joined_rows(take_epoch(Batches(numbered(60), 5)))
    assert sorted(rows) == list(range(60))
    assert rows != list(range(60))


def test_every_epoch_is_another_permutation() -> None:
    batches = Batches(numbered(60), 60)
    orders = [tuple(rows[0]) for rows in (take_epoch(batches) for _ in range(4))]
    assert len(set(orders)) == 4


def test_the_same_seed_repeats_the_stream_and_another_does_not() -> None:
    first, again, other = (take_rows(Batches(numbered(60), 7, seed=seed), 20) for seed in (3, 3, 4))
    assert first == again != other


def test_neighbouring_seeds_and_epochs_do_not_share_an_order() -> None:
    orders = {tuple(joined_rows(take_epoch(batches))) for batches in _epochs_of_seeds(seeds=5, epochs=5)}
    assert len(orders) == 25


def _epochs_of_seeds(seeds: int, epochs: int) -> list[Batches]:
    streams = []
    for seed, epoch in itertools.product(range(seeds), range(epochs)):
        batches = Batches(numbered(60), 60, seed=seed)
        batches.load_state_dict({"epoch": epoch, "step_in_epoch": 0})
        streams.append(batches)
    return streams


def test_the_global_generator_of_torch_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    take_rows(Batches(numbered(60), 7), 20)
    assert torch.equal(torch.rand(1), expected)


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    spare=st.integers(0, 60),
    seed=st.integers(0, 2**40),
)
def test_the_workers_batches_of_a_step_are_the_blocks_of_the_joined_batch(
    workers: int, batch_size: int, spare: int, seed: int
) -> None:
    source = numbered(workers * batch_size + spare)
    joined = Batches(source, workers * batch_size, seed=seed)
    each = [Batches(source, batch_size, worker=w, workers=workers, seed=seed) for w in range(workers)]
    for _ in range(2 * joined.steps_per_epoch + 1):
        together_inputs, together_labels = (torch.cat(parts) for parts in zip(*map(next, each), strict=True))
        inputs, labels = next(joined)
        assert torch.equal(together_labels, labels)
        assert torch.equal(together_inputs, inputs)
        assert {batches.epoch for batches in each} == {joined.epoch}


@settings(max_examples=60, deadline=None)
@given(workers=st.integers(1, 5), batch_size=st.integers(1, 7), spare=st.integers(0, 60), drop_last=st.booleans())
def test_shares_are_disjoint_and_cover_the_epoch_up_to_its_rest(
    workers: int, batch_size: int, spare: int, drop_last: bool
) -> None:
    rows = workers * batch_size + spare
    each = [Batches(numbered(rows), batch_size, worker=w, workers=workers, drop_last=drop_last) for w in range(workers)]
    assert len({batches.steps_per_epoch for batches in each}) == 1
    taken = [take_epoch(batches) for batches in each]
    used = [row for batches in taken for batch in batches for row in batch]
    assert len(used) == len(set(used))
    rest = rows % (workers * batch_size)
    left_out = rest if drop_last or rest < workers else 0
    assert len(used) == rows - left_out
    for batches in taken:
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert all(batches)
    assert all(batches.epoch == 1 for batches in each)


def test_the_rest_of_an_epoch_is_dealt_out_evenly_when_not_dropped() -> None:
    each = [Batches(numbered(25), 5, worker=w, workers=2, drop_last=False) for w in range(2)]
    assert [len(batch) for batch in take_rows(each[0], 4)] == [5, 5, 3, 5]
    assert [len(batch) for batch in take_rows(each[1], 4)] == [5, 5, 2, 5]


def test_with_shares_of_their_own_every_worker_visits_all_rows_in_its_own_order() -> None:
    each = [Batches(numbered(60), 6, worker=w, workers=3, share="own") for w in range(3)]
    orders = [joined_rows(take_epoch(batches)) for batches in each]
    assert all(sorted(order) == list(range(60)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert each[0].steps_per_epoch == 10


def test_a_share_of_its_own_does_not_depend_on_the_number_of_workers() -> None:
    few = Batches(numbered(60), 6, worker=1, workers=2, share="own")
    many = Batches(numbered(60), 6, worker=1, workers=9, share="own")
    assert take_rows(few, 25) == take_rows(many, 25)


def test_the_position_is_that_of_the_next_batch() -> None:
    batches = Batches(numbered(35), 5, workers=2)
    positions = []
    for _ in range(7):
        positions.append((batches.epoch, batches.step_in_epoch))
        next(batches)
    assert batches.steps_per_epoch == 3
    assert positions == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_iter_gives_the_same_stream() -> None:
    batches = Batches(numbered(20), 5)
    assert iter(batches) is batches


@pytest.mark.parametrize("done", [0, 1, 5, 6, 7, 13])
@pytest.mark.parametrize("options", [{}, {"share": "own"}, {"drop_last": False}])
def test_a_stream_resumed_from_json_goes_on_exactly(done: int, options: dict[str, Any]) -> None:
    def make() -> Batches:
        return Batches(numbered(64), 5, worker=1, workers=2, seed=9, **options)

    stopped = make()
    take_rows(stopped, done)
    saved = json.loads(json.dumps(stopped.state_dict()))
    resumed = make()
    take_rows(resumed, 4)  # a used stream can go elsewhere too
    resumed.load_state_dict(saved)
    assert (resumed.epoch, resumed.step_in_epoch) == (stopped.epoch, stopped.step_in_epoch)
    assert take_rows(resumed, 20) == take_rows(stopped, 20)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("batch_size", Batches(numbered(60), 4, workers=2)),
        ("workers", Batches(numbered(60), 5, workers=3)),
        ("seed", Batches(numbered(60), 5, workers=2, seed=1)),
        ("rows", Batches(numbered(61), 5, workers=2)),
        ("share", Batches(numbered(60), 5, workers=2, share="own")),
    ],
)
def test_a_position_of_another_order_is_refused_and_says_what_differs(name: str, changed: Batches) -> None:
    saved = Batches(numbered(60), 5, workers=2).state_dict()
    if name == "share":
        saved["workers"] = 1
    with pytest.raises(ConfigError, match=rf"{name}=.*the saved position belongs to batches with {name}="):
        changed.load_state_dict(saved)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "epoch=None"),
        ({"epoch": -1, "step_in_epoch": 0}, "epoch=-1"),
        ({"epoch": "1", "step_in_epoch": 0}, "epoch='1'"),
        ({"epoch": 1}, "step_in_epoch=None"),
        ({"epoch": 1, "step_in_epoch": 12}, "step_in_epoch=12 .* from 0 to 11"),
    ],
)
def test_a_position_that_does_not_exist_is_refused_and_changes_nothing(state: dict[str, Any], message: str) -> None:
    batches = Batches(numbered(60), 5)
    take_rows(batches, 2)
    with pytest.raises(ConfigError, match=message):
        batches.load_state_dict(state)
    assert (batches.epoch, batches.step_in_epoch) == (0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be 1 or more"),
        ({"batch_size": -3}, "batch_size=-3: must be 1 or more"),
        ({"batch_size": 61}, "batch_size=61: must be at most 60, the number of rows; use a smaller batch or more data"),
        (
            {"batch_size": 31, "workers": 2},
            "batch_size=31: must be at most 30, each worker's share of 60 rows over 2 workers; "
            "use a smaller batch, fewer workers or share='own' or more data",
        ),
        ({"batch_size": 61, "workers": 2, "share": "own"}, "batch_size=61: must be at most 60, the number of rows"),
        ({"batch_size": 5, "workers": 0}, "workers=0: must be 1 or more"),
        ({"batch_size": 5, "worker": 2, "workers": 2}, "worker=2: must be from 0 to 1, since workers=2"),
        ({"batch_size": 5, "worker": -1}, "worker=-1: must be from 0 to 0"),
        ({"batch_size": 5, "seed": -1}, "seed=-1: must be 0 or more"),
        ({"batch_size": 5, "share": "half"}, "share='half': must be 'split'"),
    ],
)
def test_arguments_out_of_range_are_refused_with_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Batches(numbered(60), **options)
    assert str(caught.value).startswith(message)


def test_the_largest_batch_that_fits_is_one_step_per_epoch() -> None:
    assert Batches(numbered(61), 30, workers=2).steps_per_epoch == 1


def test_a_pair_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 inputs and 5 labels"):
        Batches((torch.zeros(4, 2), torch.zeros(5)), 2)
