"""Settings of the program when a gradient is refused, when the chief is dead, and when updates are made again from a journal."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torchquorum as tq
from tests.equivalence.test_settings import LOCK, adam, backward, momentum, net, same, sgd, two_groups
from tests.harness import PATIENCE, Cluster
from torchquorum.session.join import Task

STEPS, BAD = 9, (3, 6)
PATHS = [{}, {"transport": "tcp"}, {"ps": 3}, {"rule": tq.Async()}, {"rule": tq.Async(), "transport": "tcp"}]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def write(optimizer: torch.optim.Optimizer, step: int) -> None:
    """What a program writes before a step: rates at every step, other options at the steps whose gradients are bad, and at one more."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.02 * (step + 1) + 0.01 * number
        if step in (*BAD, STEPS - 2):
            group["weight_decay"] = 0.01 * step
            if "momentum" in group:
                group["momentum"] = 0.1 * step
            if "betas" in group:
                group["betas"] = (0.9 - 0.03 * step, 0.99)


def poison(model: nn.Module) -> None:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.view(-1)[0] = math.nan


def plain(make: Make, *, bad: tuple[int, ...] = BAD, repeats: bool = False) -> list[torch.Tensor]:
    """Without the steps whose gradients are refused; what is written before these is the next step's, unless that writes it anew."""
    model = net()
    optimizer = make(model)
    for step in range(STEPS):
        if not repeats or step not in bad:
            write(optimizer, step)
        if step in bad:
            write(optimizer, step)
            continue
        optimizer.zero_grad()
        backward(model, 0, step)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("options", PATHS, ids=str)
@pytest.mark.parametrize("make", [sgd, momentum, adam, two_groups])
def test_what_came_with_a_refused_gradient_holds_from_the_next_update_on(make: Make, options: dict[str, Any]) -> None:
    def work(task: Task) -> tuple[list[torch.Tensor], list[bool | None]]:
        model = net()
        optimizer = tq.Optimizer(make(model), rule=options.get("rule", tq.Sync()))
        accepted = []
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            for step in range(STEPS):
                write(optimizer, step)
                optimizer.zero_grad()
                backward(model, 0, step)
                if step in BAD:
                    poison(model)
                optimizer.step()
                accepted.append(optimizer.last.accepted)
        return [p.detach().clone() for p in model.parameters()], accepted

    [(ours, accepted)] = Cluster(ps=options.get("ps", 1), transport=options.get("transport", "auto")).run(work)
    assert accepted == [step not in BAD for step in range(STEPS)]
    assert same(ours, plain(make))


@pytest.mark.parametrize("options", PATHS, ids=str)
def test_it_holds_too_where_nothing_is_written_after_it(options: dict[str, Any]) -> None:
    """A scheduler that is asked once an epoch, and whose next gradient is refused: its rate must not be lost."""

    def work(task: Task) -> tuple[list[torch.Tensor], list[float]]:
        model = net()
        optimizer = tq.Optimizer(sgd(model), rule=options.get("rule", tq.Sync()))
        used = []
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            for step in range(6):
                if step == 3:
                    optimizer.param_groups[0].update(lr=0.05, weight_decay=0.1)
                optimizer.zero_grad()
                backward(model, 0, step)
                if step == 3:
                    poison(model)
                optimizer.step()
                used.append(optimizer.used_lr[0])
        return [p.detach().clone() for p in model.parameters()], used

    [(ours, used)] = Cluster(ps=options.get("ps", 1), transport=options.get("transport", "auto")).run(work)
    model = net()
    optimizer = sgd(model)
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0].update(lr=0.05, weight_decay=0.1)
            continue
        optimizer.zero_grad()
        backward(model, 0, step)
        optimizer.step()
    assert same(ours, [p.detach() for p in model.parameters()])
    assert used == [0.3, 0.3, 0.3, 0.3, 0.05, 0.05]


@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("make", [adam, two_groups])
def test_a_durable_run_makes_its_updates_again_with_the_settings_of_each(make: Make, ps: int, tmp_path: Path) -> None:
    cluster = Cluster(ps=ps)

    def work(task: Task) -> list[torch.Tensor]:
        model = net()
        optimizer = tq.Optimizer(make(model))
        with tq.Session(
            task, model, optimizer, logdir=tmp_path, durable=True, save_every_steps=4, patience=PATIENCE
        ) as session:
            for step in range(STEPS):
                write(optimizer, step)
                optimizer.zero_grad()
                backward(model, 0, step)
                if step in BAD:
                    poison(model)
                optimizer.step()
                if step in (
                    2,
                    3,
                    7,
                ):  # also while a change waits for its update: the worker's next push brings it again
                    before = [p.detach().clone() for p in model.parameters()]
                    for index in range(ps):
                        cluster.restart(index)
                    session.pull()
                    assert same(before, [p.detach() for p in model.parameters()])
        return [p.detach().clone() for p in model.parameters()]

    assert same(cluster.run(work)[0], plain(make))


@pytest.mark.parametrize("options", [{}, {"transport": "tcp"}, {"ps": 2}], ids=str)
@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async()], ids=str)
def test_while_the_chief_is_gone_the_settings_of_the_worker_that_stands_in_count(
    rule: Any, options: dict[str, Any]
) -> None:
    cluster = Cluster(ps=options.get("ps", 1), workers=3, transport=options.get("transport", "auto"))
    all_in, gone = threading.Barrier(3), threading.Event()
    rates = {0: 0.5, 1: 0.25, 2: 0.125}

    def work(task: Task) -> list[float]:
        with LOCK:
            model = net()
        optimizer, used = tq.Optimizer(sgd(model), rule=rule), list[float]()
        with tq.Session(task, model, optimizer, patience=PATIENCE) as session:
            all_in.wait(20)
            for step in range(2):
                optimizer.param_groups[0]["lr"] = rates[task.index]
                optimizer.zero_grad()
                backward(model, task.index, step)
                optimizer.step()
            if not task.is_chief:
                assert gone.wait(20)
                session.pull()
                while task.index == 1 and not session.leads:  # it hears of that with a beat
                    time.sleep(0.01)
                for step in range(3):
                    optimizer.zero_grad()
                    backward(model, task.index, step)
                    optimizer.step()
                    used.append(optimizer.used_lr[0])
            if task.index == 2:
                session.request_stop()
        if task.is_chief:
            gone.set()
        return used

    _, first, second = cluster.run(work, work, work)
    assert first[-1] == rates[1], "those of the one that stands in"
    assert rates[2] not in first + second, "never those of the third"


def test_a_scheduler_object_of_the_worker_that_stands_in_goes_on_where_the_chiefs_ended() -> None:
    cluster, all_in, gone = Cluster(workers=2), threading.Barrier(2), threading.Event()

    def work(task: Task) -> list[float]:
        with LOCK:
            model = net()
        optimizer, used = tq.Optimizer(sgd(model), tq.Async()), list[float]()
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        with tq.Session(task, model, optimizer, patience=PATIENCE) as session:
            all_in.wait(20)
            for step in range(6):
                if step == 3:
                    if task.is_chief:
                        break
                    assert gone.wait(20)
                    session.pull()
                    while not session.leads:
                        time.sleep(0.01)
                optimizer.zero_grad()
                backward(model, task.index, step)
                optimizer.step()
                used.append(optimizer.used_lr[0])
                scheduler.step()
        if task.is_chief:
            gone.set()
        return used

    assert cluster.run(work, work)[1][3:] == [0.3 * 0.5**step for step in range(3, 6)]
