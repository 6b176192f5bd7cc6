"""What follows an update: what it may be given, to which variables it applies, and what workers can do themselves."""

from typing import Any

import pytest
import torch

import torchquorum as tq
from torchquorum.errors import ConfigError
from torchquorum.placement import Variable, place
from torchquorum.update.constraints import Constraints, check_after_update, constrained, read_after_update
from torchquorum.update.kernels import Kernel, Moment, Sgd

VARIABLES = [
    Variable(name="w", shape=(3, 5), dtype="float32", group=0),
    Variable(name="b", shape=(5,), dtype="float32", group=0),
    Variable(name="fixed", shape=(4, 4), dtype="float32", group=-1),
]


def make(*specs: Any) -> tuple[Constraints, list[torch.Tensor]]:
    layout = place(VARIABLES, 1)
    section = torch.arange(layout.trained[0].sections[0].numel, dtype=torch.float32)
    return Constraints(specs, layout, 0), [section]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: tq.Clamp(1, 0), "must not be more"),
        (lambda: tq.Clamp(float("nan"), 0), "two finite numbers"),
        (lambda: tq.Clamp("a", 0), "two finite numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: tq.MaxNorm(0), "above 0"),
        (lambda: tq.MaxNorm(True), "above 0"),
        (lambda: tq.MaxNorm(1.0, dim=-1), "dim=-1"),
        (lambda: tq.UnitNorm(only=[3]), "names of parameters"),  # pyright: ignore[reportArgumentType]
        (lambda: read_after_update(torch.clamp), "a function cannot travel"),
        (lambda: read_after_update([tq.Clamp(0, 1), 7]), "after_update=7"),
        (lambda: check_after_update([tq.Clamp(0, 1, only="fixed")], place(VARIABLES, 1)), "would do nothing"),
        (lambda: check_after_update([tq.MaxNorm(1, only="v*")], place(VARIABLES, 1)), r"only=\['v\*'\]"),
        (lambda: check_after_update([tq.MaxNorm(1, dim=2)], place(VARIABLES, 1)), r"w of shape \[3, 5\] has no such"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrong()


def test_rows_are_counted_by_a_dimension_and_vectors_only_where_they_are_named() -> None:
    constraints, sections = make(tq.MaxNorm(1.0))
    constraints.apply(sections)
    w, b = sections[0][:15].view(3, 5), sections[0][16:21]
    assert torch.allclose(w.norm(dim=1), torch.ones(3)) and b.tolist() == [16, 17, 18, 19, 20]
    constraints, sections = make(tq.UnitNorm(dim=1, only=["w"]), tq.UnitNorm(only="b"))
    constraints.apply(sections)
    w, b = sections[0][:15].view(3, 5), sections[0][16:21]
    assert torch.allclose(w.norm(dim=0), torch.ones(5)) and torch.allclose(b.norm(), torch.ones(()))
    constraints, sections = make(tq.MaxNorm(1.0, dim=None))
    constraints.apply(sections)
    assert torch.allclose(sections[0][:15].norm(), torch.ones(()))


def test_padding_stays_as_it_is() -> None:
    constraints, sections = make(tq.Clamp(1.5, 2.5))
    before = sections[0].clone()
    constraints.apply(sections)
    assert sections[0][15] == before[15] and sections[0][:15].unique().tolist() == [1.5, 2.0, 2.5]


def test_workers_clamp_every_element_and_do_nothing_else() -> None:
    kernels: list[Kernel] = [Sgd({})]
    assert constrained(kernels, []) is kernels and constrained(None, []) is None
    for spec in (tq.MaxNorm(1.0), tq.UnitNorm(), tq.Clamp(0.5, 1.0), tq.Clamp(-1, 1, only="w")):
        assert constrained(kernels, [spec]) is None
    (clamped,) = constrained(kernels, [tq.Clamp(-1, 1), tq.Clamp(-0.5, 2)]) or []
    assert clamped.plain
    new, gradient = torch.empty(3), torch.tensor([-9.0, 0.0, 1.0])
    clamped.write(Moment(1.0, 0), torch.tensor([0.0, 0.2, -3.0]), gradient, new, (), ())
    assert new.tolist() == pytest.approx([1.0, 0.2, -0.5])
    values = torch.tensor([5.0])
    clamped.without_gradient(values)
    assert values.item() == 1.0
