"""Hooks of torch.optim on a tq.Optimizer, on the one that it wraps, and on all optimizers: called as in plain PyTorch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.optim.optimizer as of_torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import same
from tests.harness import PATIENCE, Cluster
from torchquorum.session.join import Task

STEPS = 4


class Calls:
    """What the hooks have been called with."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def before(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        self.made.append("before")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    def after(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        self.made.append("after")


def on_it(optimizer: torch.optim.Optimizer, before: Any, after: Any) -> None:
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


@contextmanager
def on_all(before: Any, after: Any) -> Iterator[None]:
    handles = (
        of_torch.register_optimizer_step_pre_hook(before),
        of_torch.register_optimizer_step_post_hook(after),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def train(wrap: Callable[[nn.Module, torch.optim.Optimizer], Any], hooks: str) -> tuple[list[torch.Tensor], list[str]]:
    torch.manual_seed(0)
    model, calls = nn.Linear(4, 3), Calls()
    inner = torch.optim.Adadelta(model.parameters(), lr=0.5)  # no kernel: a ps steps a torch.optim optimizer
    if hooks == "inner":
        on_it(inner, calls.before, calls.after)
    optimizer = wrap(model, inner)
    if hooks == "outer":
        on_it(optimizer, calls.before, calls.after)
    with on_all(calls.before, calls.after) if hooks == "all" else on_all(lambda *_: None, lambda *_: None):
        for number in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(5, 4, generator=torch.Generator().manual_seed(number))).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], calls.made


@pytest.mark.parametrize("hooks", ["inner", "outer", "all"])
def test_they_are_called_once_at_each_step_of_the_program(hooks: str) -> None:
    def work(task: Task) -> Any:
        sessions: list[tq.Session] = []

        def port(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            ported = tq.Optimizer(optimizer)
            sessions.append(tq.Session(task, model, ported, patience=PATIENCE).start())
            return ported

        found = train(port, hooks)
        sessions[0].close()
        return found

    values, calls = Cluster().run(work)[0]
    plain, expected = train(lambda _model, optimizer: optimizer, hooks)
    assert calls == expected == ["before", "after"] * STEPS
    assert same(values, plain)


def test_hooks_of_states_are_those_of_the_optimizer_that_is_wrapped_too() -> None:
    def work(task: Task) -> list[str]:
        model, seen = nn.Linear(4, 3), list[str]()
        inner = torch.optim.Adam(model.parameters())
        inner.register_state_dict_post_hook(lambda _, found: {**found, "note": 3})
        inner.register_load_state_dict_pre_hook(lambda _, given: seen.append(f"loading {given.pop('note')}"))
        optimizer = tq.Optimizer(inner)
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        return seen

    assert Cluster().run(work) == [["loading 3"]]


def test_a_profiler_sees_the_steps() -> None:
    model = nn.Linear(2, 1)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with tq.Session(tq.join(), model, optimizer), torch.profiler.profile() as profile:
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#Optimizer.step", "Optimizer.zero_grad#Optimizer.zero_grad"} <= names
