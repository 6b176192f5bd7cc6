"""A sync run whose workers come and go equals plain PyTorch that accumulates as many gradients, batch by batch."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.data.numbered import NumberedBatches
from torchquorum.formats.ledger import read_ledger
from torchquorum.session.join import Task

ROWS, BATCH, EPOCHS = 96, 4, 3
X = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()


def make_model() -> nn.Module:
    model = nn.Linear(5, 1)
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize(("rule", "quorum"), [(tq.Sync(), 3), (tq.Sync(aggregate=4), 4), (tq.Sync(aggregate=2), 2)])
def test_gradients_per_update_stay_what_was_asked_for(rule: Any, quorum: int, tmp_path: Path) -> None:
    cluster = Cluster(workers=3, min_workers=1)
    come, gone = threading.Event(), threading.Event()
    inside = [threading.Event() for _ in range(3)]

    def work(task: Task) -> list[torch.Tensor]:
        if task.index > 0:
            assert come.wait(30)
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model), rule=rule)
        with tq.Session(task, model, optimizer, logdir=tmp_path, patience=PATIENCE) as session:
            inside[task.index].set()
            given = 0
            loader = DataLoader(TensorDataset(X, Y), batch_size=BATCH, shuffle=True)
            for x, y in session.share(loader, epochs=EPOCHS):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
                given += bool(optimizer.last.accepted)
                if task.index == 0 and session.global_step >= 3 and not come.is_set():
                    come.set()
                    assert all(event.wait(30) for event in inside)
                if task.index == 2 and given == 3:
                    gone.set()
                    break  # it goes in the middle of the epoch, and others get what it had
            session.pull()
        return [p.detach().clone() for p in model.parameters()]

    found = cluster.run(*[work] * 3)[0]
    assert come.is_set() and gone.is_set()

    updates: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for entry in read_ledger(tmp_path):
        if entry.accepted:
            assert isinstance(entry.batches, dict)
            updates[entry.met].append((entry.worker, entry.batches["data"][0]))
    numbers = sorted(number for given in updates.values() for _, number in given)
    assert numbers == list(range(EPOCHS * ROWS // BATCH))
    assert all(len(given) == quorum for given in updates.values())
    assert {worker for given in updates.values() for worker, _ in given} == {0, 1, 2}

    model = make_model()
    plain, batches = make_optimizer(model), NumberedBatches((X, Y), BATCH, seed=0, shuffle=True, drop_last=False)
    for _, given in sorted(updates.items()):
        plain.zero_grad()
        for _, number in given:
            x, y = batches.fetch(number)
            ((model(x) - y).square().mean() / quorum).backward()
        plain.step()
    for ours, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_one_worker_goes_through_the_data_as_plain_pytorch_does() -> None:
    batches = NumberedBatches((X, Y), 10, seed=3, shuffle=True, drop_last=False)
    seen = []

    def work(task: Task) -> list[torch.Tensor]:
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model), rule=tq.Async())
        with tq.Session(task, model, optimizer, patience=PATIENCE) as session:
            share = session.share((X, Y), 10, epochs=2, seed=3)
            for x, y in share:
                seen.append(share.number)
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
        assert (share.epoch, len(share)) == (1, 20)
        return [p.detach().clone() for p in model.parameters()]

    found = Cluster(workers=1).run(work)[0]
    assert seen == list(range(20))
    model = make_model()
    plain = make_optimizer(model)
    for number in seen:
        x, y = batches.fetch(number)
        plain.zero_grad()
        (model(x) - y).square().mean().backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))


@pytest.mark.parametrize("per_step", [2, 3])
def test_several_batches_may_make_one_step(per_step: int, tmp_path: Path) -> None:
    def work(task: Task) -> None:
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model), rule=tq.Sync())
        with tq.Session(task, model, optimizer, logdir=tmp_path, patience=PATIENCE, wait_for_workers=2) as session:
            for count, (x, y) in enumerate(session.share((X, Y), 4, epochs=EPOCHS), 1):
                (model(x) - y).square().mean().backward()
                if count % per_step == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    Cluster(workers=2).run(work, work)
    given = [e.batches["data"] for e in read_ledger(tmp_path) if e.accepted and isinstance(e.batches, dict)]
    assert all(len(numbers) == per_step for numbers in given)
    used = [number for numbers in given for number in numbers]
    assert len(used) == len(set(used)) and len(used) > EPOCHS * ROWS // 4 - 2 * per_step
