"""Which variable lives on which shard, and where in its memory."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from torchquorum.errors import ConfigError, RefusedError
from torchquorum.placement.layout import (
    ALIGN_BYTES,
    CONSTANT,
    ITEM_BYTES,
    TRAINABLE_DTYPES,
    Region,
    Variable,
    check_same_variables,
    padded,
    place,
)


def variable(name: str, *shape: int, dtype: str = "float32", group: int = 0) -> Variable:
    return Variable(name=name, shape=shape, dtype=dtype, group=group)


def test_variables_go_round_in_creation_order() -> None:
    """The order of a typical program: a step counter, then weights and biases."""
    variables = [
        variable("gs", dtype="int64", group=CONSTANT),
        variable("w1", 784, 100),
        variable("b1", 100),
        variable("w2", 100, 10),
        variable("b2", 10),
    ]
    layout = place(variables, 2)
    assert {v.name: layout.shard_of(v.name) for v in variables} == {
        "gs": [0],
        "w1": [1],
        "b1": [0],
        "w2": [1],
        "b2": [0],
    }


def test_greedy_takes_the_shard_with_the_fewest_bytes_and_the_lowest_on_ties() -> None:
    sizes = {"a": 10, "b": 4, "c": 4, "d": 3, "e": 1, "f": 1}
    layout = place([variable(n, s) for n, s in sizes.items()], 3, strategy="greedy")
    assert {n: layout.shard_of(n) for n in sizes} == {"a": [0], "b": [1], "c": [2], "d": [1], "e": [2], "f": [2]}


def test_greedy_counts_bytes_and_not_elements() -> None:
    layout = place(
        [variable("wide", 4, dtype="float64"), variable("narrow", 7, dtype="bfloat16"), variable("next", 1)],
        2,
        strategy="greedy",
    )
    assert layout.shard_of("next") == [1]


def test_only_what_is_larger_than_slice_bytes_is_cut() -> None:
    layout = place([variable("small", 25), variable("large", 26)], 3, slice_bytes=100)
    assert layout.shard_of("small") == [0]
    assert layout.shard_of("large") == [0, 1, 2]
    assert [p[-1][1:] for p in layout.parts] == [(0, 8), (8, 17), (17, 26)]


def test_with_one_shard_nothing_is_cut() -> None:
    assert place([variable("large", 1000)], 1, slice_bytes=1).parts == (((0, 0, 1000),),)


def test_within_a_section_pieces_stand_by_group_and_then_in_creation_order() -> None:
    layout = place([variable("a", 1, group=1), variable("b", 1), variable("c", 1, group=1), variable("d", 1)], 1)
    assert [p.variable for p in layout.trained[0].sections[0].pieces] == [1, 3, 0, 2]


def test_constants_have_a_region_of_their_own() -> None:
    layout = place([variable("w", 3), variable("table", 3, dtype="int64", group=CONSTANT)], 1)
    assert [s.dtype for s in layout.trained[0].sections] == ["float32"]
    assert [s.dtype for s in layout.constants[0].sections] == ["int64"]


def test_more_shards_than_variables_leave_some_empty() -> None:
    layout = place([variable("a", 3)], 3)
    assert [r.size_bytes for r in layout.trained] == [64, 0, 0]


@pytest.mark.parametrize(
    ("numel", "dtype", "room"),
    [(0, "float32", 0), (1, "float32", 16), (16, "float32", 16), (9, "float64", 16), (1, "bool", 64)],
)
def test_room_is_whole_cache_lines(numel: int, dtype: str, room: int) -> None:
    assert padded(numel, dtype) == room


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "random"}, "placement strategy 'random': allowed are round_robin, greedy"),
        ({"slice_bytes": 0}, "slice_bytes=0: must be 1 or more; leave it out to split none"),
    ],
)
def test_options_that_are_not_allowed_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place([variable("a", 3)], 2, **options)


def test_a_dtype_that_cannot_be_trained_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="variable ids: dtype int64; allowed are float64, float32"):
        place([variable("ids", 3, dtype="int64")], 1)


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
variables_ = st.lists(
    st.tuples(shapes, st.sampled_from(TRAINABLE_DTYPES), st.integers(0, 2))
    | st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES)), st.just(CONSTANT)),
    max_size=8,
).map(lambda given: [Variable(name=f"v{i}", shape=s, dtype=d, group=g) for i, (s, d, g) in enumerate(given)])


def check_region(region: Region, variables: list[Variable]) -> list[tuple[int, int]]:
    """Checks alignment and order; returns the elements that the region holds."""
    held, at = [], 0
    for section in region.sections:
        assert section.start_byte == at and at % ALIGN_BYTES == 0
        end = 0
        for piece in section.pieces:
            assert variables[piece.variable].dtype == section.dtype
            assert piece.offset == end and piece.offset * ITEM_BYTES[section.dtype] % ALIGN_BYTES == 0
            end = piece.offset + padded(piece.numel, section.dtype)
            held += [(piece.variable, k) for k in range(piece.start, piece.stop)]
        assert section.numel == end
        at += section.size_bytes
    assert region.size_bytes == at
    widths = [ITEM_BYTES[s.dtype] for s in region.sections]
    assert widths == sorted(widths, reverse=True)
    return held


@given(variables_, st.integers(1, 5), st.sampled_from(["round_robin", "greedy"]), st.none() | st.integers(1, 200))
def test_every_element_is_in_exactly_one_piece_and_every_piece_is_aligned(
    variables: list[Variable], num_shards: int, strategy: str, slice_bytes: int | None
) -> None:
    layout = place(variables, num_shards, strategy=strategy, slice_bytes=slice_bytes)
    held: list[tuple[int, int]] = []
    for region in (*layout.trained, *layout.constants):
        held += check_region(region, variables)
    assert sorted(held) == [(i, k) for i, v in enumerate(variables) for k in range(v.numel)]
    assert layout == place(variables, num_shards, strategy=strategy, slice_bytes=slice_bytes)


# -- the same variables everywhere ----------------------------------------------------------------------------------------

OURS = [variable("w", 4, 5), variable("b", 5), variable("table", 3, group=CONSTANT)]


def test_the_same_variables_pass_and_any_one_left_out_does_not() -> None:
    assert check_same_variables(OURS, tuple(OURS), "somebody") is None
    for i in range(len(OURS)):
        with pytest.raises(RefusedError):
            check_same_variables(OURS, OURS[:i] + OURS[i + 1 :], "somebody")


@pytest.mark.parametrize(
    ("theirs", "shown"),
    [
        ([variable("w", 4, 6), *OURS[1:]], ["- the ps tasks hold w [4, 5] float32", "+ X has w [4, 6] float32"]),
        ([variable("w", 4, 5, dtype="float64"), *OURS[1:]], ["w [4, 5] float32", "w [4, 5] float64"]),
        (OURS[:2], ["- the ps tasks hold table [3] float32 (constant)"]),
        ([*OURS, variable("more", 1)], ["+ X has more [1] float32"]),
        ([OURS[1], OURS[0], OURS[2]], ["the order or the parameter groups differ"]),
        ([OURS[0], variable("b", 5, group=1), OURS[2]], ["the order or the parameter groups differ"]),
        ([OURS[0], OURS[1], variable("table", 3)], ["table [3] float32 (constant)", "+ X has table [3] float32"]),
    ],
)
def test_other_variables_are_refused_and_the_difference_is_shown(theirs: list[Variable], shown: list[str]) -> None:
    with pytest.raises(RefusedError) as raised:
        check_same_variables(OURS, theirs, "X")
    for words in ["X has another model", "Start every task with the same program", *shown]:
        assert words in str(raised.value)


def test_only_the_first_differences_are_shown() -> None:
    with pytest.raises(RefusedError) as raised:
        check_same_variables([variable(f"a{i}", 1) for i in range(50)], [variable(f"b{i}", 1) for i in range(50)], "X")
    assert len(str(raised.value).splitlines()) == 13
