"""What is updated together: by group and dtype, until variables get gradients apart from each other."""

import pytest
import torch

from torchquorum.errors import ConfigError
from torchquorum.memory.slots import section_views
from torchquorum.placement.layout import Region, Variable, place
from torchquorum.update.spans import Span, Spans
from torchquorum.wire.messages import OptimizerSpec

VARIABLES = [
    Variable(name="a", shape=(3, 5), dtype="float32", group=0),
    Variable(name="b", shape=(4,), dtype="float32", group=0),
    Variable(name="c", shape=(2, 2), dtype="float32", group=1),
]


def region(num_shards: int = 1, slice_bytes: int | None = None) -> Region:
    return place(VARIABLES, num_shards, slice_bytes=slice_bytes).trained[0]


def spans(name: str = "SGD", **options: object) -> Spans:
    groups = [{"lr": 0.1, **options}, {"lr": 0.1, **options}]
    return Spans(region(), VARIABLES, OptimizerSpec(name, groups))


def pieces(of: Spans) -> list[list[int]]:
    return [[piece.variable for piece in span.pieces] for span in of]


def test_variables_of_a_group_are_one_span_of_flat_memory() -> None:
    found = spans()
    assert pieces(found) == [[0, 1], [2]]
    assert [len(group) for group in found.groups] == [1, 1]
    memory = torch.arange(region().size_bytes // 4, dtype=torch.float32)
    first, second = found.views_of(section_views(region(), memory.view(torch.uint8)))
    assert first.dim() == second.dim() == 1 and not set(first.tolist()) & set(second.tolist())


@pytest.mark.parametrize(("name", "options"), [("Adafactor", {}), ("SGD", {"fused": True})])
def test_an_optimizer_that_looks_at_whole_variables_has_one_for_each(name: str, options: dict[str, object]) -> None:
    assert pieces(spans(name, **options)) == [[0], [1], [2]]


def test_slices_are_refused_where_the_optimizer_looks_at_whole_variables() -> None:
    with pytest.raises(ConfigError, match="leave slice_bytes out"):
        Spans(region(2, 16), VARIABLES, OptimizerSpec("Adafactor", [{"lr": 0.1}, {"lr": 0.1}]))


def test_a_span_is_cut_where_the_kind_changes_and_its_owner_hears_of_it() -> None:
    found, told = spans(), list[tuple[Span, list[Span]]]()
    (whole, _), memory = list(found), torch.zeros(region().size_bytes, dtype=torch.uint8)
    views = section_views(region(), memory)
    before = found.views_of(views)
    assert found.cut(lambda piece: piece.variable == 1, lambda *cut: told.append(cut)) == [0]
    assert pieces(found) == [[0], [1], [2]] and len(found.views_of(views)) == len(before) + 1
    assert told == [(whole, found.groups[0])]
    assert found.cut(lambda piece: piece.variable == 1, lambda *cut: told.append(cut)) == [] and len(told) == 1


def test_views_of_memory_that_comes_again_are_kept_until_a_cut() -> None:
    found, memory = spans(), torch.zeros(region().size_bytes, dtype=torch.uint8)
    views = section_views(region(), memory)
    first = found.views_of(views)
    assert found.views_of(views) is first
    assert found.views_of(list(views)) is not first  # of any other memory they are not
    found.cut(lambda piece: piece.variable, lambda _span, _parts: None)
    assert found.views_of(views) is not first
