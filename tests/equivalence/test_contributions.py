"""What a gradient counts for: examples of uneven batches, equal time, and what the ledger says of local steps."""

import functools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import ConfigError
from torchquorum.formats.ledger import Entry, read_records
from torchquorum.session.join import Task

ONE = functools.partial(torch.optim.SGD, lr=1.0)
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
SIZES = (3, 7)  # examples of each worker's batch


def net() -> nn.Module:
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    return model


def batch(step: int, worker: int) -> torch.Tensor:
    start = step * sum(SIZES) % 40
    return X[start : start + SIZES[0]] if worker == 0 else X[start + SIZES[0] : start + sum(SIZES)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def weighted(rule: tq.Rule, folder: Path | None = None, **options: Any) -> list[torch.Tensor]:
    cluster, all_in = Cluster(workers=2, **options), threading.Barrier(2)

    def work(task: Task) -> list[torch.Tensor]:
        model = net()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=rule)
        with tq.Session(task, model, optimizer, last_step=8, logdir=folder, patience=PATIENCE) as session:
            all_in.wait(20)
            step = 0
            while not session.should_stop():
                x = batch(step, task.index)
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                optimizer.step(loss=loss, examples=len(x))
                step += 1
            session.pull()
        return [p.detach().clone() for p in model.parameters()]

    try:
        return cluster.run(work, work)[0]
    finally:
        cluster.stop()


@pytest.mark.parametrize("options", [{}, {"transport": "tcp", "ps": 2}], ids=str)
def test_uneven_batches_make_the_update_of_the_joined_batch(options: dict[str, Any]) -> None:
    found = weighted(tq.Sync(), **options)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(step, 0), batch(step, 1)])).backward()
        optimizer.step()
    for ours, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_changes_of_local_steps_count_by_their_examples(tmp_path: Path) -> None:
    found = weighted(tq.Local(2, ONE), tmp_path)
    shared = net()
    for step in range(0, 16, 2):
        total = [torch.zeros_like(p) for p in shared.parameters()]
        for worker, size in enumerate(SIZES):
            model = net()
            model.load_state_dict(shared.state_dict())
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            for k in range(2):
                inner.zero_grad()
                loss_of(model, batch(step + k, worker)).backward()
                inner.step()
            for t, p in zip(total, model.parameters(), strict=True):
                t.add_(p.detach(), alpha=size / sum(SIZES))
        with torch.no_grad():
            for p, t in zip(shared.parameters(), total, strict=True):
                p.copy_(t)
    for ours, theirs in zip(found, shared.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    entries = [r for r in read_records(tmp_path / "ledger.jsonl") if isinstance(r, Entry)]
    assert {(e.worker, e.weight) for e in entries} == {(0, 6.0), (1, 14.0)}
    assert [e.inner_step for e in entries if e.worker == 1] == list(range(2, 17, 2))
    assert {e.steps for e in entries} == {2}


@pytest.mark.parametrize(("rule", "examples"), [(tq.Async(), 5), (tq.Sync(), 0), (tq.Sync(), True), (tq.Sync(), "5")])
def test_examples_without_effect_are_an_error(rule: tq.Rule, examples: Any) -> None:
    cluster = Cluster()

    def work(task: Task) -> None:
        model = net()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=rule)
        with tq.Session(task, model, optimizer, last_step=2, patience=PATIENCE):
            loss_of(model, X).backward()
            with pytest.raises(ConfigError, match="examples="):
                optimizer.step(examples=examples)
            optimizer.step()

    try:
        cluster.run(work)
    finally:
        cluster.stop()


def test_a_slower_worker_makes_fewer_steps_in_equal_time(tmp_path: Path) -> None:
    cluster, all_in = Cluster(workers=2), threading.Barrier(2)

    def work(task: Task) -> int:
        model = net()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule=tq.Local("auto", ONE, most=16))
        with tq.Session(task, model, optimizer, last_step=5, logdir=tmp_path, patience=PATIENCE) as session:
            all_in.wait(20)
            while not session.should_stop():
                optimizer.zero_grad()
                loss_of(model, X).backward()
                time.sleep(0.01 if task.index == 0 else 0.04)
                optimizer.step()
            return session.inner_step

    try:
        fast, slow = cluster.run(work, work)
    finally:
        cluster.stop()
    assert fast == 2 + 4 * 16
    assert 2 + 4 <= slow <= fast / 2
    entries = [r for r in read_records(tmp_path / "ledger.jsonl") if isinstance(r, Entry)]
    assert all(e.weight == e.steps for e in entries)
    assert sum(e.steps for e in entries if e.worker == 1 and e.accepted and isinstance(e.steps, int)) <= slow


def test_the_ledger_accounts_for_what_came_too_late(tmp_path: Path) -> None:
    """An update of one change at the same version: whoever loses the race gives both changes the next time."""
    rule, cluster, all_in = tq.Local(1, ONE, aggregate=1, max_staleness=0), Cluster(workers=2), threading.Barrier(2)

    def work(task: Task) -> None:
        model = net()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.001), rule=rule)
        with tq.Session(task, model, optimizer, last_step=30, logdir=tmp_path, patience=PATIENCE) as session:
            all_in.wait(20)
            while not session.should_stop():
                optimizer.zero_grad()
                loss_of(model, X).backward()
                optimizer.step()

    try:
        cluster.run(work, work)
    finally:
        cluster.stop()
    entries = [r for r in read_records(tmp_path / "ledger.jsonl") if isinstance(r, Entry)]
    for worker in (0, 1):
        open_ = 0
        for entry in (e for e in entries if e.worker == worker):
            if not entry.accepted:
                open_ += 1
                continue
            assert (entry.carries if isinstance(entry.carries, int) else 0) == open_
            open_ = 0
    assert any(not e.accepted for e in entries)
