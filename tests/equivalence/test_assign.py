"""`session.assign()`: what the chief has written becomes the next version for all workers, as a plain program would have it."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import same
from tests.harness import PATIENCE, Cluster
from torchquorum.formats.ledger import read_records
from torchquorum.session.join import Task

STEPS, AT = 6, 3


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def backward(model: nn.Module, worker: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * worker + step)
    model(torch.randn(4, 7, generator=generator)).square().mean().backward()


def write(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model[2].weight.copy_(torch.randn(3, 5, generator=generator))  # pyright: ignore[reportIndexIssue]
    model[0].bias.data.clamp_(0.0, 0.05)  # pyright: ignore[reportIndexIssue]


def plain(make: Any, workers: int = 1) -> list[torch.Tensor]:
    model = make_model()
    optimizer = make(model)
    for step in range(STEPS):
        if step == AT:
            write(model)
        sums: list[Any] = [None] * 4
        for worker in range(workers):
            optimizer.zero_grad()
            backward(model, worker, step)
            for i, p in enumerate(model.parameters()):
                sums[i] = p.grad.clone() if sums[i] is None else sums[i] + p.grad  # pyright: ignore[reportOptionalMemberAccess]
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total / workers if workers > 1 else total
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(make: Any, workers: int = 1, rule: Any = None, **options: Any) -> list[tuple[int, list[torch.Tensor]]]:
    cluster, session_options = (
        Cluster(ps=options.pop("ps", 1), workers=workers, transport=options.pop("transport", "auto")),
        options,
    )
    lock, all_in = threading.Lock(), threading.Barrier(workers)

    def work(task: Task) -> tuple[int, list[torch.Tensor]]:
        with lock:
            model = make_model()
        optimizer = tq.Optimizer(
            make(model), rule=rule or tq.Sync(), slice_bytes=session_options.pop("slice_bytes", None)
        )
        with tq.Session(task, model, optimizer, patience=PATIENCE, **session_options) as session:
            all_in.wait(20)
            for step in range(STEPS):
                if step == AT:
                    write(model, task.index)  # the others write too, and theirs does not count
                    assert session.assign() == AT + 1
                optimizer.zero_grad()
                backward(model, task.index, step)
                optimizer.step()
            session.pull()
            return session.global_step, [p.detach().clone() for p in model.parameters()]

    return cluster.run(*[work] * workers)


@pytest.mark.parametrize("options", [{}, {"transport": "tcp"}, {"ps": 3}, {"ps": 2, "slice_bytes": 40}], ids=str)
@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_one_worker_goes_on_as_the_plain_program(make: Any, options: dict[str, Any]) -> None:
    step, ours = train(make, **options)[0]
    assert step == STEPS + 1
    assert same(ours, plain(make))


@pytest.mark.parametrize("options", [{}, {"transport": "tcp"}, {"ps": 2}], ids=str)
def test_under_sync_it_lies_between_two_rounds_and_the_chiefs_values_count(options: dict[str, Any]) -> None:
    expected = plain(sgd, workers=2)
    for step, ours in train(sgd, workers=2, **options):
        assert step == STEPS + 1
        assert same(ours, expected)


def test_async_with_one_worker_and_with_a_gradient_on_its_way() -> None:
    step, ours = train(sgd, rule=tq.Async())[0]
    assert step == STEPS + 1 and same(ours, plain(sgd))


def test_the_ledger_says_what_was_assigned(tmp_path: Path) -> None:
    train(sgd, workers=2, logdir=str(tmp_path))
    events = [r for r in read_records(tmp_path, lambda _: None) if getattr(r, "event", "") == "assigned"]
    assert [(e.version, e.worker, e.text) for e in events] == [(AT + 1, 0, "0.bias, 2.weight became version 4")]  # pyright: ignore[reportAttributeAccessIssue]
