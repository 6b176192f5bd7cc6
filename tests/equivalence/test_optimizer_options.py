"""Every class of torch.optim with the options that choose how it computes: each has plain PyTorch's bits, or is refused in words."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import same
from tests.harness import PATIENCE, Cluster
from torchquorum.session.join import Task

STEPS = 5
NAMES = [
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
    "Adafactor",
]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(number))).square().mean().backward()
    optimizer.step()


def plain(make: Make, *, bias: bool = True) -> list[torch.Tensor]:
    model = net(bias=bias)
    optimizer = make(model)
    for number in range(STEPS):
        step(model, optimizer, number)
    return [p.detach() for p in model.parameters()]


def ours(make: Make, *, bias: bool = True, ps: int = 1, **options: Any) -> list[torch.Tensor]:
    def work(task: Task) -> list[torch.Tensor]:
        model = net(bias=bias)
        optimizer = tq.Optimizer(make(model), **options)
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            for number in range(STEPS):
                step(model, optimizer, number)
        return [p.detach().clone() for p in model.parameters()]

    return Cluster(ps=ps).run(work)[0]


def make_of(name: str, **options: Any) -> Make:
    kind = getattr(torch.optim, name)
    rate = {"lr": 0.1} if name in ("SGD", "Adagrad") else {}
    return lambda model: kind(model.parameters(), **rate, **options)


def takes(name: str, option: str) -> bool:
    return option in inspect.signature(getattr(torch.optim, name)).parameters


@pytest.mark.parametrize(
    "option", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}], ids=str
)
def test_an_option_that_says_how_has_the_same_bits(option: dict[str, bool]) -> None:
    for name in NAMES:
        if takes(name, *option):
            make = make_of(name, **option)
            assert same(ours(make), plain(make)), name


def test_a_ps_has_no_gpu_whose_graphs_it_could_be_captured_in() -> None:
    for name in ("Adam", "NAdam", "ASGD"):
        assert same(ours(make_of(name, capturable=True)), plain(make_of(name))), name


@pytest.mark.parametrize("rate", [torch.tensor(0.01), torch.tensor(0.01, dtype=torch.float64)], ids=str)
def test_a_rate_may_be_a_tensor(rate: torch.Tensor) -> None:
    for option in ({"foreach": False}, {"fused": True}):
        make = make_of("Adam", lr=rate.clone(), **option)
        assert same(ours(make), plain(make_of("Adam", lr=rate.clone(), **option)))


@pytest.mark.parametrize("ps", [1, 2])
def test_one_that_takes_matrices_only(ps: int) -> None:
    make = make_of("Muon", lr=0.02)
    assert same(ours(make, bias=False, ps=ps), plain(make, bias=False))
    with pytest.raises(tq.errors.TorchQuorumError, match="is sliced over shards, which its optimizer cannot do; leave"):
        ours(make, bias=False, ps=2, slice_bytes=40)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_through_which_gradients_would_flow_is_refused(name: str) -> None:
    if takes(name, "differentiable"):
        with pytest.raises(tq.errors.ConfigError, match="differentiable=True: the update is made on the ps tasks"):
            tq.Optimizer(make_of(name, differentiable=True)(net()))


@tq.register_optimizer
class AssertsAtThree(torch.optim.SGD):
    """An optimizer of a program that finds its own mistake."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        AssertsAtThree.steps += 1
        assert AssertsAtThree.steps < 3, "the rate became negative"
        return super().step(closure)


def test_an_assertion_of_an_optimizer_of_ones_own_is_a_failed_update() -> None:
    AssertsAtThree.steps = 0
    with pytest.raises(tq.errors.UpdateError, match="the update to version 3 failed .*the rate became negative"):
        ours(lambda model: AssertsAtThree(model.parameters(), lr=0.1))
