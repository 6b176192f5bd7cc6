"""A run with a scheduler object that is stopped and resumed equals the uninterrupted one, and a restarted chief keeps the rate."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torchquorum as tq
from tests.equivalence.test_settings import LOCK, adam, net, same, sgd
from tests.harness import PATIENCE, Cluster

X = torch.randn(200, 9, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(1))
SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def run(
    last_step: int,
    logdir: Path | None,
    name: str = "StepLR",
    *,
    ps: int = 1,
    workers: int = 1,
    make: Any = sgd,
    saves: bool = True,
    lr: float | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], float, int]:
    cluster = Cluster(ps=ps, workers=workers)
    all_in = threading.Barrier(workers)

    def work(task: Any) -> Any:
        with LOCK:
            model = net()
        inner = make(model)
        if lr is not None:
            inner.param_groups[0]["lr"] = lr
        optimizer = tq.Optimizer(inner)
        scheduler = SCHEDULERS[name](optimizer)
        batches = tq.Batches((X, Y), 10, worker=task.index, workers=workers)
        data: dict[str, Any] = {"batches": batches, **({"scheduler": scheduler} if saves else {})}
        with tq.Session(
            task, model, optimizer, last_step=last_step, logdir=logdir, data=data, patience=PATIENCE, **options
        ) as session:
            all_in.wait(20)
            started = session.global_step
            while not session.should_stop():
                x, y = next(batches)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step(loss.detach()) if name == "ReduceLROnPlateau" else scheduler.step()
            session.pull()
        return [p.detach().clone() for p in model.parameters()], optimizer.param_groups[0]["lr"], started

    return cluster.run(*[work] * workers)[0]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_run_goes_on_with_its_scheduler(name: str, tmp_path: Path) -> None:
    make = adam if name == "OneCycleLR" else sgd
    whole, rate, _ = run(14, None, name, make=make)
    run(5, tmp_path, name, make=make)
    run(9, tmp_path, name, make=make, ps=2, save_every_steps=3)
    resumed, rate_now, started = run(14, tmp_path, name, make=make)
    assert started == 9 and same(resumed, whole) and rate_now == rate


@pytest.mark.parametrize("durable", ["", "write"])
def test_two_workers_resume_in_sync(durable: str, tmp_path: Path) -> None:
    whole, _, _ = run(12, None, workers=2)
    run(5, tmp_path, workers=2, durable=durable)
    resumed, _, started = run(12, tmp_path, workers=2, durable=durable)
    assert started == 5 and same(resumed, whole)


def test_a_scheduler_that_is_not_saved_is_told_of_and_the_rate_is_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(5, tmp_path, saves=False)
    capsys.readouterr()
    run(6, tmp_path, saves=False)
    said = capsys.readouterr().err
    assert "goes on at global step 5 with lr=0.075, and a scheduler object begins anew" in said
    assert "is not in tq.Session(data=...)" in said


def test_another_rate_in_the_program_counts_when_a_run_is_resumed(tmp_path: Path) -> None:
    run(5, tmp_path, "LambdaLR", saves=False)
    _, rate, _ = run(6, tmp_path, "LambdaLR", saves=False, lr=0.05)
    assert rate == pytest.approx(0.05 * 0.8)
