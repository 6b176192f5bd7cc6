"""What the chief's program writes into param_groups counts from the update on that its next push belongs to, bit for bit."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torchquorum as tq
from tests.harness import PATIENCE, Cluster

STEPS = 10
Program = Callable[[torch.optim.Optimizer], Callable[[int, float], Any]]  # makes what is called after each step


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 11), nn.Tanh(), nn.Linear(11, 3))


def backward(model: nn.Module, worker: int, step: int) -> float:
    generator = torch.Generator().manual_seed(100 * worker + step)
    x, y = torch.randn(8, 9, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return float(loss.detach())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights, biases = ([p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False))
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.05}], lr=0.3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def each_step(make: Callable[[torch.optim.Optimizer], Any]) -> Program:
    """A scheduler object that is asked after each step."""

    def begin(optimizer: torch.optim.Optimizer) -> Callable[[int, float], Any]:
        scheduler = make(optimizer)
        return lambda step, loss: scheduler.step()

    return begin


def each_second(optimizer: torch.optim.Optimizer) -> Callable[[int, float], Any]:
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return lambda step, loss: scheduler.step() if step % 2 else None


def plateau(optimizer: torch.optim.Optimizer) -> Callable[[int, float], Any]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return lambda step, loss: scheduler.step(loss)


def by_hand(optimizer: torch.optim.Optimizer) -> Callable[[int, float], Any]:
    def set_rate(step: int, loss: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 + 0.2 * (1 + math.cos(math.pi * step / STEPS))

    return set_rate


def weight_decay(optimizer: torch.optim.Optimizer) -> Callable[[int, float], Any]:
    def set_decay(step: int, loss: float) -> None:
        if step in (2, 6):
            optimizer.param_groups[0]["weight_decay"] = 0.1 if step == 2 else 0.0
            optimizer.param_groups[0]["lr"] *= 0.7

    return set_decay


def momentum_on_and_off(optimizer: torch.optim.Optimizer) -> Callable[[int, float], Any]:
    def set_momentum(step: int, loss: float) -> None:
        optimizer.param_groups[0]["momentum"] = 0.9 if 2 <= step < 6 else 0.0

    return set_momentum


def momentum_now_and_then(optimizer: torch.optim.Optimizer) -> Callable[[int, float], Any]:
    """While it is off, torch.optim keeps the momentum of before."""

    def set_momentum(step: int, loss: float) -> None:
        optimizer.param_groups[0]["momentum"] = (0.9, 0.0, 0.5)[step % 3]

    return set_momentum


def betas(optimizer: torch.optim.Optimizer) -> Callable[[int, float], Any]:
    def set_betas(step: int, loss: float) -> None:
        optimizer.param_groups[0]["betas"] = (0.9 - 0.05 * step, 0.999)

    return set_betas


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """As the schedules of Hugging Face."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * max(0.1, 1 - step / STEPS))


def in_sequence(optimizer: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, 7)], [3])


PROGRAMS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], Program]] = {
    "StepLR": (sgd, each_step(lambda o: lr_scheduler.StepLR(o, 3, gamma=0.3))),
    "StepLR each second step": (sgd, each_second),
    "MultiStepLR": (two_groups, each_step(lambda o: lr_scheduler.MultiStepLR(o, [2, 5]))),
    "ExponentialLR": (sgd, each_step(lambda o: lr_scheduler.ExponentialLR(o, 0.7))),
    "CosineAnnealingLR": (two_groups, each_step(lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS))),
    "CosineAnnealingWarmRestarts": (sgd, each_step(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3))),
    "PolynomialLR": (sgd, each_step(lambda o: lr_scheduler.PolynomialLR(o, STEPS))),
    "LambdaLR": (two_groups, each_step(warm_up)),
    "MultiplicativeLR": (sgd, each_step(lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9))),
    "SequentialLR": (sgd, each_step(in_sequence)),
    "CyclicLR": (momentum, each_step(lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3))),
    "OneCycleLR": (adam, each_step(lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1))),
    "ReduceLROnPlateau": (sgd, plateau),
    "SWALR": (sgd, each_step(lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4))),
    "by hand": (two_groups, by_hand),
    "by hand, adam": (adam, by_hand),
    "weight decay": (sgd, weight_decay),
    "momentum on and off": (sgd, momentum_on_and_off),
    "momentum now and then": (sgd, momentum_now_and_then),
    "momentum off now and then": (momentum, momentum_now_and_then),
    "betas": (adam, betas),
}


def plain(name: str, workers: int = 1) -> list[torch.Tensor]:
    """One process on the mean of the workers' gradients; the chief's loss goes to the scheduler."""
    model = net()
    optimizer = PROGRAMS[name][0](model)
    after = PROGRAMS[name][1](optimizer)
    for step in range(STEPS):
        losses, sums = [], []
        for worker in range(workers):
            optimizer.zero_grad()
            losses.append(backward(model, worker, step))
            sums.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, gradients in zip(model.parameters(), zip(*sums, strict=True), strict=True):
            total = gradients[0]
            for gradient in gradients[1:]:
                total = total + gradient
            parameter.grad = total / workers if workers > 1 else total
        optimizer.step()
        after(step, losses[0])
    return [p.detach() for p in model.parameters()]


def quorum(
    name: str,
    *,
    workers: int = 1,
    ps: int = 1,
    transport: str = "auto",
    rule: Any = None,
    made: list[int] | None = None,
) -> list[torch.Tensor]:
    cluster = Cluster(ps=ps, workers=workers, transport=transport)
    all_in = threading.Barrier(workers)

    def work(task: Any) -> list[torch.Tensor]:
        with LOCK:
            model = net()
        optimizer = tq.Optimizer(PROGRAMS[name][0](model), rule=rule or tq.Sync())
        # Only the chief's program counts: the others run other lines here.
        after = PROGRAMS[name][1](optimizer) if task.is_chief else lambda step, loss: None
        with tq.Session(task, model, optimizer, last_step=STEPS, patience=PATIENCE) as session:
            all_in.wait(20)
            while not session.should_stop():
                optimizer.zero_grad()
                step, loss = session.global_step, backward(model, task.index, session.global_step)
                optimizer.step()
                after(step, loss)
            link = optimizer.link
            if (
                made is not None
                and link is not None
                and link.joined is not None
                and link.joined.tracks[0].fastpath is not None
            ):
                made.append(link.joined.tracks[0].fastpath.made)
        return [p.detach().clone() for p in model.parameters()]

    return cluster.run(*[work] * workers)[0]


LOCK = threading.Lock()  # threads share torch's random state


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_worker_follows_its_own_settings(name: str) -> None:
    assert same(quorum(name), plain(name))


@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "weight decay"])
@pytest.mark.parametrize("ps", [1, 2])
def test_over_tcp_and_with_several_ps(name: str, ps: int) -> None:
    assert same(quorum(name, ps=ps, transport="tcp"), plain(name))


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "momentum on and off", "by hand, adam", "ReduceLROnPlateau"])
@pytest.mark.parametrize(("ps", "transport"), [(1, "auto"), (1, "tcp"), (2, "auto")])
def test_in_sync_the_chiefs_settings_are_those_of_the_round(name: str, ps: int, transport: str) -> None:
    assert same(quorum(name, workers=2, ps=ps, transport=transport), plain(name, workers=2))


@pytest.mark.parametrize("rule", [tq.Async(), tq.Sync()], ids=str)
def test_rates_travel_on_the_fast_path(rule: Any) -> None:
    made: list[int] = []
    assert same(quorum("by hand", rule=rule, made=made), plain("by hand"))
    assert made and made[0] > STEPS // 2
