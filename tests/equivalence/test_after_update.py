"""What is done after every update has the bits of the same torch operations after `optimizer.step()`, on every path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import Net, backward, same
from tests.harness import train
from torchquorum.errors import ConfigError

STEPS = 8
Make = Callable[[nn.Module], torch.optim.Optimizer]
Act = Callable[[nn.Module], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.clamp_(-0.05, 0.05)


def max_norm(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dim() >= 2:
            parameter.data.copy_(torch.renorm(parameter.data, 2, 0, 0.5))


def unit_norm(model: nn.Module) -> None:
    weight = model.get_parameter("last.weight")
    weight.data.copy_(nn.functional.normalize(weight.data, dim=1))


def plain(make: Make, act: Act, workers: int = 1) -> list[torch.Tensor]:
    model = Net()
    optimizer = make(model)
    for step in range(STEPS):
        sums: list[Any] = [None] * len(list(model.parameters()))
        for worker in range(workers):
            optimizer.zero_grad()
            backward(model, worker, step)
            for i, p in enumerate(model.parameters()):
                if p.grad is not None:
                    sums[i] = p.grad.clone() if sums[i] is None else sums[i] + p.grad
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = None if total is None else total / workers if workers > 1 else total
        optimizer.step()
        act(model)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async()], ids=str)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize(
    ("after", "act"),
    [
        (tq.Clamp(-0.05, 0.05), clamp),
        (tq.MaxNorm(0.5), max_norm),
        (tq.UnitNorm(only="last.weight"), unit_norm),
    ],
    ids=["clamp", "max_norm", "unit_norm"],
)
def test_one_worker(after: Any, act: Act, make: Make, transport: str, rule: Any) -> None:
    ours, _ = train(Net, make, backward, steps=STEPS, rule=rule, transport=transport, after_update=after)
    assert same(ours, plain(make, act))


@pytest.mark.parametrize("options", [{}, {"ps": 3}, {"ps": 3, "slice_bytes": 500}, {"transport": "tcp"}], ids=str)
def test_two_workers_on_one_ps_and_on_several_and_with_sliced_variables(options: dict[str, Any]) -> None:
    ours, _ = train(Net, sgd, backward, steps=STEPS, workers=2, after_update=tq.Clamp(-0.05, 0.05), **options)
    assert same(ours, plain(sgd, clamp, workers=2))


def test_norms_on_several_ps_tasks() -> None:
    ours, _ = train(Net, sgd, backward, steps=STEPS, ps=3, workers=2, after_update=tq.MaxNorm(0.5))
    assert same(ours, plain(sgd, max_norm, workers=2))


def test_several_are_done_in_their_order_and_a_clamp_that_excludes_zero_leaves_padding_alone() -> None:
    def act(model: nn.Module) -> None:
        max_norm(model)
        for name, parameter in model.named_parameters():
            if name.startswith("first"):
                parameter.data.clamp_(0.01, 0.02)

    after = [tq.MaxNorm(0.5), tq.Clamp(0.01, 0.02, only="first.*")]
    ours, _ = train(Net, sgd, backward, steps=STEPS, after_update=after)
    assert same(ours, plain(sgd, act))


def test_norms_of_a_sliced_variable_are_refused_when_the_session_begins() -> None:
    with pytest.raises(ConfigError, match=r"MaxNorm: parameter first\.weight is sliced over the ps tasks.*slice_bytes"):
        train(Net, sgd, backward, steps=1, ps=2, slice_bytes=500, after_update=tq.MaxNorm(0.5))
