"""Assignments when workers are late, dead or gone, when others have pushed since, and in durable runs."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.session.join import Task


def make(task: Task, rule: Any = None, **options: Any) -> tuple[nn.Linear, tq.Optimizer, tq.Session]:
    model = nn.Linear(3, 2)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=rule or tq.Sync())
    return model, optimizer, tq.Session(task, model, optimizer, patience=PATIENCE, **options)


def step(model: nn.Linear, optimizer: tq.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()


def fill(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def test_what_others_pushed_since_is_said_to_be_overwritten() -> None:
    cluster, wrote, pushed = Cluster(workers=2), threading.Event(), threading.Event()

    def chief(task: Task) -> Any:
        model, optimizer, session = make(task, tq.Async())
        with session:
            step(model, optimizer)
            fill(model, 2.0)
            wrote.set()
            assert pushed.wait(20)
            session.assign()
            return model.weight.detach().clone()

    def other(task: Task) -> Any:
        assert wrote.wait(20)
        model, optimizer, session = make(task, tq.Async())
        with session:
            for _ in range(3):
                step(model, optimizer)
            bias = model.bias.detach().clone()
            pushed.set()
            session.assign()
            assert torch.equal(model.bias.detach(), bias), "what was not written to keeps what others pushed"
            return model.weight.detach().clone()

    assert all(torch.equal(weight, torch.full((2, 3), 2.0)) for weight in cluster.run(chief, other))
    said = [line for line in cluster.said if "assigned values" in line]
    assert said == [
        "/job:worker/task:0 assigned values: weight became version 5; in these, 3 updates since version 1 are overwritten"
    ]


def test_a_worker_that_comes_first_waits_for_the_chief_and_one_that_comes_late_does_not() -> None:
    cluster, order = Cluster(workers=3), list[str]()
    early, made = threading.Event(), threading.Event()
    all_in = threading.Barrier(3)

    def chief(task: Task) -> None:
        model, _, session = make(task)
        with session:
            all_in.wait(20)
            assert early.wait(20)
            fill(model, 1.0)
            order.append("chief")
            session.assign()
            made.set()

    def first(task: Task) -> float:
        model, _, session = make(task)
        with session:
            all_in.wait(20)
            threading.Timer(0.3, early.set).start()
            session.assign()
            order.append("first")
            return float(model.weight[0, 0].detach())

    def late(task: Task) -> float:
        model, _, session = make(task)
        with session:
            all_in.wait(20)
            assert made.wait(20)
            session.assign()
            return float(model.weight[0, 0].detach())

    assert cluster.run(chief, first, late) == [None, 1.0, 1.0]
    assert order == ["chief", "first"]


def test_while_the_chief_is_gone_the_first_worker_alive_gives_its_values() -> None:
    cluster, gone, all_in = Cluster(workers=3), threading.Event(), threading.Barrier(3)

    def chief(task: Task) -> None:
        with make(task, last_step=50)[2]:
            all_in.wait(20)
        gone.set()

    def other(task: Task) -> float:
        model, _, session = make(task, last_step=50)
        with session:
            all_in.wait(20)
            if task.index == 2:
                assert gone.wait(20)
            fill(model, float(task.index))
            session.assign()
            session.request_stop()
            return float(model.weight[0, 0].detach())

    found = cluster.run(chief, other, other)
    assert found == [None, 1.0, 1.0], (found, cluster.said)


def test_nothing_that_was_written_makes_no_version() -> None:
    def work(task: Task) -> int:
        model, optimizer, session = make(task)
        with session:
            step(model, optimizer)
            return session.assign()

    assert Cluster().run(work) == [1]


@pytest.mark.parametrize("ps", [1, 2])
def test_a_durable_run_that_is_resumed_has_what_was_assigned(ps: int, tmp_path: Path) -> None:
    def work(task: Task) -> Any:
        model, optimizer, session = make(task, logdir=str(tmp_path), durable=True, last_step=20)
        with session:
            step(model, optimizer)
            fill(model, 3.0)
            session.assign()
            step(model, optimizer)
            kept = [p.detach().clone() for p in model.parameters()]
            cluster.restart(0)
            if ps > 1:
                cluster.restart(1)
            session.pull()
            assert session.global_step == 3
            assert all(map(torch.equal, kept, model.parameters()))
            fill(model, 4.0)
            assert session.assign() == 4, "also after all was made again"
            session.request_stop()

    cluster = Cluster(ps=ps)
    work_done = cluster.run(work)
    assert work_done == [None]
