"""One update of a shard: the spans, the mean, the optimizer, and what cannot run on a ps."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchquorum.errors import ConfigError
from torchquorum.memory.slots import section_views
from torchquorum.placement.layout import Variable, place
from torchquorum.update.optimizers import build
from torchquorum.update.updater import Updater
from torchquorum.wire.messages import OptimizerSpec, ScheduleSpec


def variable(name: str, *shape: int, dtype: str = "float32", group: int = 0) -> Variable:
    return Variable(name=name, shape=shape, dtype=dtype, group=group)


class Bench:
    """An Update with its memory; gradients are given per variable, None for absent."""

    def __init__(
        self,
        variables: Sequence[Variable],
        optimizer: str = "SGD",
        *groups: dict[str, Any],
        schedule: ScheduleSpec | None = None,
        num_shards: int = 1,
        slice_bytes: int | None = None,
    ) -> None:
        self.variables = list(variables)
        self.region = place(variables, num_shards, slice_bytes=slice_bytes).trained[0]
        self.memory = torch.zeros(self.region.size_bytes, dtype=torch.uint8)
        spec = OptimizerSpec(optimizer, list(groups) or [{"lr": 1.0}])
        self.update = Updater(self.region, variables, spec, schedule, section_views(self.region, self.memory))

    def sections(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        memory = torch.zeros(self.region.size_bytes, dtype=torch.uint8)
        sections = section_views(self.region, memory)
        for section, flat in zip(self.region.sections, sections, strict=True):
            for piece in section.pieces:
                value = values[piece.variable]
                if value is not None:
                    flat[piece.offset : piece.offset + piece.numel] = value.reshape(-1)[piece.start : piece.stop]
        return sections

    def step(self, *gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        absent = frozenset(i for i in range(len(self.variables)) if all(g[i] is None for g in gradients))
        new = torch.empty_like(self.memory)
        self.update.apply(
            section_views(self.region, self.memory),
            section_views(self.region, new),
            [self.sections(g) for g in gradients],
            absent,
        )
        self.memory = new
        return self.values()

    def values(self) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        sections = section_views(self.region, self.memory)
        for section, flat in zip(self.region.sections, sections, strict=True):
            for piece in section.pieces:
                value = flat[piece.offset : piece.offset + piece.numel]
                found[piece.variable] = value.clone().view(self.variables[piece.variable].shape)
        return [found[i] for i in sorted(found)]

    @property
    def spans(self) -> list[list[int]]:
        """The variables of each span."""
        return [[p.variable for p in s.pieces] for s in self.update.spans]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def test_variables_of_one_group_and_dtype_are_one_span() -> None:
    variables = [
        variable("a", 3, 5),
        variable("b", 7, group=1),
        variable("c", 2),
        variable("d", 4, dtype="float64"),
        variable("e", 1, dtype="float64"),
    ]
    bench = Bench(variables, "SGD", {"lr": 0.1}, {"lr": 0.2})
    assert bench.spans == [[3, 4], [0, 2], [1]]


def test_half_precision_is_updated_variable_by_variable() -> None:
    bench = Bench([variable("a", 3, dtype="bfloat16"), variable("b", 4, dtype="bfloat16")])
    assert bench.spans == [[0], [1]]


def test_an_optimizer_that_looks_at_whole_variables_gets_them_in_their_shape() -> None:
    bench = Bench([variable("a", 3, 5), variable("b", 4)], "Adafactor", {"lr": 0.1})
    assert bench.spans == [[0], [1]]
    assert [tuple(s.parameter.shape) for s in bench.update.spans] == [(3, 5), (4,)]


def test_slices_are_refused_where_the_optimizer_looks_at_whole_variables() -> None:
    with pytest.raises(ConfigError, match="variable a is sliced over shards.*leave slice_bytes out"):
        Bench([variable("a", 40)], "Adafactor", {"lr": 0.1}, num_shards=2, slice_bytes=8)


def test_a_step_without_some_gradients_splits_their_span_for_good() -> None:
    bench = Bench([variable(n, 2) for n in "abcd"])
    assert bench.spans == [[0, 1, 2, 3]]
    bench.step([ones(2), None, None, ones(2)])
    assert bench.spans == [[0], [1, 2], [3]]
    bench.step([ones(2)] * 4)
    assert bench.spans == [[0], [1, 2], [3]]
    assert [v.tolist() for v in bench.values()] == [[-2, -2], [-1, -1], [-1, -1], [-2, -2]]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("Adam", {"lr": 0.1, "betas": [0.8, 0.9]}),
        ("RMSprop", {"lr": 0.1, "centered": True}),
        ("Adafactor", {"lr": 0.1}),
    ],
)
def test_a_variable_without_a_gradient_keeps_its_state_as_in_torch(name: str, arguments: dict[str, Any]) -> None:
    variables = [variable("a", 3, 5), variable("b", 7), variable("c", 2, 2)]
    bench = Bench(variables, name, arguments)
    theirs = [torch.nn.Parameter(torch.zeros(v.shape)) for v in variables]
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    optimizer = getattr(torch.optim, name)(theirs, **given)
    draw = torch.Generator().manual_seed(1)
    for step in range(7):
        gradients = [
            None if (step, i) in {(2, 1), (4, 0), (4, 1), (5, 2)} else torch.randn(v.shape, generator=draw)
            for i, v in enumerate(variables)
        ]
        ours = bench.step(gradients)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b.detach())


def test_a_variable_with_a_gradient_from_only_some_workers_counts_zero_for_the_others() -> None:
    bench = Bench([variable("a", 2)])
    [value] = bench.step([ones(2) * 3], [None], [None])
    assert value.tolist() == [-1, -1]


def test_the_mean_is_the_sum_in_order_and_then_one_division() -> None:
    draw = torch.Generator().manual_seed(2)
    gradients = [torch.randn(1000, generator=draw) * 10.0**k for k in range(-2, 3)]
    bench = Bench([variable("a", 1000)])
    [value] = bench.step(*([g] for g in gradients))
    total = gradients[0] + gradients[1]
    for more in gradients[2:]:
        total = total + more
    assert torch.equal(value, -(total / 5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_mean_of_half_precision_is_made_in_its_own_precision(dtype: str) -> None:
    kind = getattr(torch, dtype)
    bench = Bench([variable("a", 33, dtype=dtype)])
    draw = torch.Generator().manual_seed(3)
    gradients = [torch.randn(33, generator=draw).to(kind) for _ in range(3)]
    [value] = bench.step(*([g] for g in gradients))
    assert torch.equal(value, -((gradients[0] + gradients[1] + gradients[2]) / 3))


def test_the_old_version_and_the_gradients_are_left_alone() -> None:
    bench = Bench([variable("a", 5)], "Adam", {"lr": 0.1})
    old = bench.memory
    before = old.clone()
    gradient = ones(5)
    bench.step([gradient])
    bench.step([gradient])
    assert torch.equal(old, before) and torch.equal(gradient, ones(5))


def test_update_k_uses_the_rate_of_step_k() -> None:
    schedule = ScheduleSpec("StepLR", {"step_size": 2, "gamma": 0.5})
    bench = Bench([variable("a", 1)], "SGD", {"lr": 1.0}, schedule=schedule)
    seen = []
    for _ in range(4):
        seen.append(bench.update.rates.now)
        bench.step([ones(1)])
    assert seen == [[1.0], [1.0], [0.5], [0.5]]
    assert bench.values()[0].item() == -3.0


def test_a_shard_without_variables_of_some_group_works() -> None:
    bench = Bench([variable("a", 4), variable("b", 4, group=1)], "SGD", {"lr": 1.0}, {"lr": 2.0}, num_shards=2)
    assert bench.update.rates.now == [1.0, 2.0]
    assert bench.step([ones(4), None])[0].tolist() == [-1] * 4


def test_a_shard_without_any_variables_works() -> None:
    bench = Bench([], "Adam", {"lr": 0.1})
    assert bench.step([]) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LBFGS", "torch.optim.LBFGS cannot run on a ps: it evaluates the loss again"),
        ("Optimizer", "not a class of torch.optim"),
        ("lr_scheduler", "not a class of torch.optim"),
        ("__import__", "not a class of torch.optim"),
        ("Magic", "optimizer 'Magic': not a class of torch.optim"),
        ("", "not a class of torch.optim"),
    ],
)
def test_what_is_no_optimizer_for_a_ps_is_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(name, [{"params": []}])
