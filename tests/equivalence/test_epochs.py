"""Loops over epochs: the bits of plain PyTorch, the joined batch, uneven numbers of batches, and going on after a stop."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.formats.ledger import read_ledger
from torchquorum.session.join import Task

X = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
DATA = TensorDataset(X, Y)


def make_model() -> nn.Module:
    model = nn.Linear(5, 1)
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_one(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def plain(epochs: int) -> list[torch.Tensor]:
    """A program with a loader that draws its order from the global generator, and a scheduler that steps once per epoch."""
    torch.manual_seed(3)
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loader = DataLoader(DATA, batch_size=7, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            train_one(model, optimizer, x, y)
        scheduler.step()
    return values(model)


def run_alone(epochs: int, logdir: Path | None, last_step: int | None = None) -> tuple[list[torch.Tensor], list[int]]:
    cluster, seen = Cluster(), list[int]()

    def work(task: Task) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        loader = DataLoader(DATA, batch_size=7, shuffle=True)
        options: dict[str, Any] = {"logdir": logdir, "last_step": last_step, "data": scheduler, "patience": PATIENCE}
        with tq.Session(task, model, optimizer, **options) as session:
            for epoch in session.epochs(epochs):
                seen.append(epoch)
                for x, y in loader:
                    train_one(model, optimizer, x, y)
                scheduler.step()
        return values(model)

    return cluster.run(work)[0], seen


def test_one_worker_has_the_bits_of_plain_pytorch() -> None:
    found, seen = run_alone(3, None)
    assert all(torch.equal(a, b) for a, b in zip(found, plain(3), strict=True))
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("stopped_at", [3, 7, 10, 14])
def test_a_run_that_was_stopped_anywhere_goes_on_in_its_epoch_with_the_same_bits(
    stopped_at: int, tmp_path: Path
) -> None:
    run_alone(3, tmp_path, last_step=stopped_at)
    found, seen = run_alone(3, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found, plain(3), strict=True))
    assert seen[0] == (stopped_at - 1) // 7
    again, seen = run_alone(3, tmp_path)
    assert seen == [] and all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


@pytest.mark.parametrize("ps", [1, 2])
def test_two_workers_under_sync_equal_the_joined_batch(ps: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for epoch in range(2):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(8):
            train_one(model, optimizer, X[rows], Y[rows])
    cluster = Cluster(ps=ps, workers=2)

    def work(task: Task) -> list[torch.Tensor]:
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model))
        loader = DataLoader(DATA, batch_size=4, sampler=tq.data.Sampler(DATA, task))
        with tq.Session(task, model, optimizer, wait_for_workers=2, patience=PATIENCE) as session:
            for _ in session.epochs(2):
                for x, y in loader:
                    train_one(model, optimizer, x, y)
            assert session.global_step == 12
        return values(model)

    for found in cluster.run(work, work):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, values(model), strict=True))


class Stream(IterableDataset[Any]):
    """As many batches as it is told."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        for i in range(self.count):
            yield X[i : i + 4], Y[i : i + 4]


RULES: list[tuple[Any, int]] = [
    (tq.Sync(), 6),
    (tq.Async(), 9),
    (tq.Bounded(1), 9),
    (tq.Buffered(4), 3),
    (tq.Async(pipeline=True), 9),
]


@pytest.mark.parametrize(("rule", "updates"), RULES, ids=lambda value: str(value))
def test_workers_with_different_numbers_of_batches_leave_an_epoch_together_and_every_batch_counts(
    rule: Any, updates: int, tmp_path: Path
) -> None:
    cluster = Cluster(workers=2)

    def work(task: Task) -> list[int]:
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model), rule=rule)
        loader = DataLoader(Stream(6 if task.index else 3), batch_size=None)
        steps = []
        with tq.Session(task, model, optimizer, logdir=tmp_path, wait_for_workers=2, patience=PATIENCE) as session:
            for _ in session.epochs(3):
                for x, y in loader:
                    train_one(model, optimizer, x, y)
                steps.append(session.global_step)  # the version that an evaluation here sees
        return steps

    first, second = cluster.run(work, work)
    assert first == second == [updates, 2 * updates, 3 * updates]
    assert sum(entry.accepted for entry in read_ledger(tmp_path)) == 27


@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async()], ids=str)
def test_a_share_is_one_epoch_at_a_time_without_names(rule: Any) -> None:
    cluster = Cluster(workers=2)

    def work(task: Task) -> tuple[list[int], int]:
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model), rule=rule)
        counts = []
        with tq.Session(task, model, optimizer, wait_for_workers=2, patience=PATIENCE) as session:
            for epoch in session.epochs(3):
                share = session.share(DATA, batch_size=7)
                counts.append(0)
                for x, y in share:
                    assert share.epoch == epoch
                    train_one(model, optimizer, x, y)
                    counts[-1] += 1
            return counts, session.global_step

    (first, step), (second, _) = cluster.run(work, work)
    assert [a + b for a, b in zip(first, second, strict=True)] == [7, 7, 7]
    assert step == (12 if rule.once_per_round else 21)


def test_an_evaluation_inside_an_epoch_is_neither_cut_nor_waited_for() -> None:
    cluster = Cluster(workers=2)

    def work(task: Task) -> list[int]:
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model))
        loader = DataLoader(DATA, batch_size=4, sampler=tq.data.Sampler(DATA, task))
        evaluated = []
        with tq.Session(task, model, optimizer, wait_for_workers=2, last_step=8, patience=PATIENCE) as session:
            for _ in session.epochs(5):
                for x, y in loader:
                    train_one(model, optimizer, x, y)
                if task.is_chief:
                    with torch.no_grad():
                        evaluated.append(sum(len(model(x)) for x, _ in DataLoader(DATA, batch_size=9)))
            assert session.global_step == 8
        return evaluated

    assert cluster.run(work, work)[0] == [48, 48]


def train_on_pairs(session_epochs: Any, model: nn.Module, optimizer: Any, way: str, seen: list[int]) -> None:
    """Epochs over two loaders at a time, of different lengths, with an evaluation now and then, as in many programs of GANs."""
    labelled = DataLoader(DATA, batch_size=7, shuffle=True)
    others = DataLoader(TensorDataset(X.flip(0), -Y), batch_size=10, shuffle=True)
    evaluation = DataLoader(DATA, batch_size=24, generator=torch.Generator())
    for epoch in session_epochs:
        more = iter(others) if way == "next" else iter([])
        pairs = zip(labelled, others, strict=False) if way == "zip" else labelled
        for i, one in enumerate(pairs):
            if way == "zip":
                (x, y), (u, v) = one
            else:
                x, y = one
                try:
                    u, v = next(more)
                except StopIteration:
                    more = iter(others)
                    u, v = next(more)
            train_one(model, optimizer, torch.cat([x, u]), torch.cat([y, v]))
            if i % 3 == 1:
                next(iter(evaluation))
                model.eval()
                seen.append(sum(len(a) for a, _ in evaluation))
                model.train()
        seen.append(epoch)


@pytest.mark.parametrize("way", ["zip", "next"])
@pytest.mark.parametrize("stopped_at", [2, 6, 12])
def test_a_loop_over_two_loaders_has_the_bits_of_plain_pytorch_also_after_a_stop(
    way: str, stopped_at: int, tmp_path: Path
) -> None:
    def run(logdir: Path | None, last_step: int | None) -> tuple[list[torch.Tensor], list[int]]:
        seen = list[int]()

        def work(task: Task) -> list[torch.Tensor]:
            torch.manual_seed(3)
            model = make_model()
            optimizer = tq.Optimizer(make_optimizer(model))
            with tq.Session(task, model, optimizer, logdir=logdir, last_step=last_step, patience=PATIENCE) as session:
                train_on_pairs(session.epochs(3), model, optimizer, way, seen)
            return values(model)

        return Cluster().run(work)[0], seen

    torch.manual_seed(3)
    model, evaluated = make_model(), list[int]()
    train_on_pairs(range(3), model, make_optimizer(model), way, evaluated)
    run(tmp_path, stopped_at)
    found, seen = run(tmp_path, None)
    assert all(torch.equal(a, b) for a, b in zip(found, values(model), strict=True))
    assert seen == evaluated[-len(seen) :]


def test_a_barrier_counts_live_workers_and_has_a_deadline() -> None:
    cluster, left = Cluster(workers=2), threading.Event()

    def work(task: Task) -> str:
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model))
        with tq.Session(task, model, optimizer, wait_for_workers=2, patience=PATIENCE) as session:
            session.barrier()
            if task.index == 1:
                assert left.wait(30)  # alive, and at no barrier
                return ""
            with pytest.raises(tq.errors.DeadlineError) as error:
                session.barrier(timeout_s=0.5)
            left.set()
            session.barrier()  # the other has left: it is not waited for
            return str(error.value)

    text = cluster.run(work, work)[0]
    assert "at session.barrier() for /job:worker/task:1, which are alive and do not come" in text


def test_what_makes_no_sense_is_an_error_in_words() -> None:
    cluster = Cluster()

    def work(task: Task) -> None:
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model))
        session = tq.Session(task, model, optimizer, patience=PATIENCE)
        with pytest.raises(tq.errors.ConfigError, match="has not begun"):
            session.epochs(3)
        with session:
            with pytest.raises(tq.errors.ConfigError, match=r"session\.epochs\(-1\): must be a whole number"):
                session.epochs(-1)
            for _ in session.epochs(1):
                with pytest.raises(tq.errors.ConfigError, match="inside a loop over session"):
                    session.epochs(1)
                with pytest.raises(tq.errors.ConfigError, match="one epoch at a time"):
                    session.share(DATA, batch_size=4, epochs=3)

    cluster.run(work)
    assert DataLoader.__iter__.__module__ == "torch.utils.data.dataloader"


def gan_epochs(cluster: Cluster, logdir: Path, *, last_step: int | None = None, epochs: int = 3) -> list[torch.Tensor]:
    """Two steps a batch, as a GAN has."""

    def work(task: Task) -> list[torch.Tensor]:
        torch.manual_seed(3)
        one, two = make_model(), make_model()
        optimizers = [tq.Optimizer(make_optimizer(model)) for model in (one, two)]
        loader = DataLoader(DATA, batch_size=7, shuffle=True)
        with tq.Session(task, [one, two], optimizers, logdir=logdir, last_step=last_step, patience=PATIENCE) as session:
            for _ in session.epochs(epochs):
                for x, y in loader:
                    train_one(two, optimizers[1], x, y)
                    train_one(one, optimizers[0], x, y - two(x).detach())
        return values(one) + values(two)

    return cluster.run(work)[0]


def test_a_gan_that_was_stopped_in_an_epoch_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    gan_epochs(Cluster(), tmp_path / "stopped", last_step=9)
    found = gan_epochs(Cluster(), tmp_path / "stopped")
    straight = gan_epochs(Cluster(), tmp_path / "straight")
    assert all(torch.equal(a, b) for a, b in zip(found, straight, strict=True))


class Killed(Exception):
    """The program fails."""


@pytest.mark.parametrize("way", ["gan", "accumulated", "plain"])
def test_a_worker_that_comes_back_leaves_out_the_batches_that_its_gradients_were_computed_from(way: str) -> None:
    cluster, ready = Cluster(workers=2), threading.Event()
    seen: list[int] = []
    fails_at = 6

    def work(task: Task, life: int) -> None:
        one, two = make_model(), make_model()
        pair = [tq.Optimizer(make_optimizer(model), rule=tq.Async()) for model in (one, two)]
        models, optimizers = ([one, two], pair) if way == "gan" else ([one], pair[:1])
        loader = DataLoader(TensorDataset(X[:24], torch.arange(24.0)), batch_size=2)
        with tq.Session(task, models, optimizers, wait_for_workers=2 - life, patience=PATIENCE) as session:
            for _ in session.epochs(1):
                for number, (x, y) in enumerate(loader):
                    if task.index == 1:
                        if number == 0 and life == 0:
                            assert ready.wait(30)  # until the other is dead and back
                        continue
                    if life == 0 and len(seen) == fails_at:
                        raise Killed
                    if life == 1:
                        ready.set()
                    seen.append(int(y[0]) // 2)
                    if way == "accumulated":
                        one.zero_grad() if len(seen) % 2 else None
                        (one(x) - 1.0).square().mean().backward()
                        if len(seen) % 2 == 0:
                            optimizers[0].step()
                        continue
                    for model, optimizer in zip(models, optimizers, strict=True):
                        train_one(model, optimizer, x, y[:, None])
        return None

    def first(task: Task) -> None:
        with pytest.raises(Killed):
            work(task, 0)
        work(cluster.task(0), 1)

    cluster.run(first, lambda task: work(task, 0))
    assert seen == list(range(12))


@pytest.mark.parametrize("how", ["epoch", "share"])
def test_a_worker_that_waits_for_the_others_notices_that_a_ps_task_other_than_the_first_is_lost(
    how: str, tmp_path: Path
) -> None:
    cluster, waits = Cluster(ps=2, workers=2), threading.Event()

    def lose() -> None:
        assert waits.wait(30)
        cluster.restart(1)

    def batches(task: Task, session: Any) -> Any:
        if how == "share":
            return session.share(DATA, batch_size=24)
        return DataLoader(Stream(1 if task.index == 0 else 4), batch_size=None)

    def work(task: Task) -> list[torch.Tensor]:
        model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model), rule=tq.Async())
        options: dict[str, Any] = {"wait_for_workers": 2, "logdir": tmp_path, "durable": True, "patience": PATIENCE}
        with tq.Session(task, model, optimizer, **options) as session:
            for _ in session.epochs(1) if how != "share" else [0]:
                for x, y in batches(task, session):
                    if task.index == 1 and not waits.is_set():
                        time.sleep(0.3)  # the other one waits by now
                        waits.set()
                        time.sleep(1.5)
                    train_one(model, optimizer, x, y)
            session.barrier()
            session.pull()
        return values(model)

    loser = threading.Thread(target=lose)
    loser.start()
    try:
        one, two = cluster.run(work, work)
        loser.join()
        cluster.wait()
    finally:
        cluster.stop()
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
