"""Readers of a whole cluster in one process: each parameter is the number of its version, so a mixture of versions shows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.cluster import TaskId
from torchquorum.errors import ConfigError
from torchquorum.reader.reader import Reader


class Counting(nn.Module):
    """With SGD at rate 1 and gradients of -1 every trained element is the version."""

    seen: torch.Tensor

    def __init__(self, sizes: tuple[int, ...] = (7, 400, 33)) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in sizes])
        self.fixed = nn.Parameter(torch.full((5,), 3.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))


class Training:
    """A run that goes on until it is told to stop."""

    def __init__(self, cluster: Cluster, last_step: int | None = None, **options: Any) -> None:
        self.cluster, self.last_step, self.options = cluster, last_step, options
        self.may_end, self.unused, self.pause_s = threading.Event(), list[int](), 0.002
        self.version = 0

    def work(self, task: Any) -> None:
        torch.set_num_threads(1)
        model = Counting()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = tq.Optimizer(torch.optim.SGD(trained, lr=1.0), **self.options)
        with tq.Session(task, model, optimizer, last_step=self.last_step, patience=PATIENCE) as session:
            while not session.should_stop() and not (self.last_step is None and self.may_end.is_set()):
                for k, part in enumerate(trained):
                    part.grad = None if k in self.unused else torch.full_like(part, -1.0)
                model.seen += 1
                optimizer.step()
                self.version = optimizer.last.version
                time.sleep(self.pause_s)


@contextmanager
def running(
    ps: int = 1, *, last_step: int | None = None, work: Callable[[Any], None] | None = None, **options: Any
) -> Iterator[tuple[str, Training]]:
    cluster = Cluster(ps=ps, sockets=True)
    training = Training(cluster, last_step, **options)
    thread = threading.Thread(target=lambda: cluster.run(work or training.work), name="torchquorum-test-run")
    thread.start()
    try:
        yield cluster.spec.address(TaskId("ps", 0)), training
    finally:
        training.may_end.set()
        thread.join(60)
        assert not thread.is_alive()


def reader(address: str, **options: Any) -> Reader:
    return tq.Reader(address, patience=PATIENCE, **options)


def is_whole(model: Counting, version: int) -> bool:
    return all(bool((part == version).all()) for part in model.parts)


@pytest.mark.parametrize(("ps", "shared"), [(1, True), (1, False), (2, True), (2, False)])
def test_a_pull_is_of_one_version_while_training_goes_on(ps: int, shared: bool) -> None:
    with running(ps) as (address, _), reader(address, shared_memory=shared) as reading:
        model, versions = Counting(), []
        for _ in range(20):
            version = reading.pull(model)
            versions.append(int(version))
            assert is_whole(model, version), (version, [float(p[0]) for p in model.parts])
            time.sleep(0.02)
        assert versions == sorted(versions) and versions[-1] > versions[0]
        assert bool((model.fixed == 3.0).all())
        assert reading.way == ("shared memory" if shared else "messages")


def test_a_reader_is_not_a_worker_and_does_not_hold_the_run_open() -> None:
    with running(last_step=50) as (address, training), reader(address, shared_memory=False) as reading:
        changes = list(reading.follow(every_s=0.01))
        assert int(changes[-1].version) == 50 and changes[-1].over
        training.may_end.set()
    assert training.version == 50


@pytest.mark.parametrize("shared", [True, False])
def test_following_ends_with_the_last_version(shared: bool) -> None:
    with running(last_step=60) as (address, _), reader(address, shared_memory=shared) as reading:
        model, versions = Counting(), []
        for change in reading.follow(every_s=0.01):
            change.apply(model)
            versions.append(int(change.version))
            assert is_whole(model, change.version)
        assert versions[-1] == 60 and versions == sorted(versions)
        assert bool((model.fixed == 3.0).all())


def test_only_the_tensors_that_changed_are_sent() -> None:
    with running() as (address, training), reader(address, shared_memory=False) as reading:
        following = reading.follow(every_s=0.05)
        assert next(following).variables.keys() == {"parts.0", "parts.1", "parts.2", "fixed"}
        training.unused = [1]  # 400 of 440 numbers
        while set(next(following).variables) != {"parts.0", "parts.2"}:
            pass
        before = reading.received_bytes
        changes = [next(following) for _ in range(10)]
        assert all(change.variables.keys() == {"parts.0", "parts.2"} for change in changes)
        changed = sum(value.nbytes for change in changes for value in change.variables.values())
        assert reading.received_bytes - before < changed + 10 * 200  # the messages themselves


def test_differences_are_compressed_and_what_is_lost_comes_later() -> None:
    with running() as (address, training), reader(address, shared_memory=False, compress="int8") as reading:
        model = Counting()
        reading.pull(model)
        before, count = reading.received_bytes, 0
        while count < 10:
            count += 1
            version = reading.pull(model)
            assert all(bool(((part - version).abs() < 0.5).all()) for part in model.parts)
            time.sleep(0.02)
        assert (reading.received_bytes - before) / count < 0.5 * 4 * 440
        training.may_end.set()


def test_averages_come_with_the_version_that_they_are_of() -> None:
    average = tq.ExponentialMovingAverage(0.5)
    with running(average=average) as (address, _), reader(address) as reading:
        model = Counting()
        version = reading.pull(model, averages=True)
        while version < 10:
            time.sleep(0.02)
            version = reading.pull(model, averages=True)
        shadow = 0.0
        for n in range(1, int(version) + 1):
            shadow -= (1 - min(0.5, (1 + n) / (10 + n))) * (shadow - n)
        assert torch.allclose(model.parts[1], torch.full((400,), shadow))


def test_averages_that_nobody_keeps_are_an_error() -> None:
    with running() as (address, _), reader(address) as reading, pytest.raises(ConfigError, match="no moving averages"):
        reading.pull(Counting(), averages=True)


def test_another_model_is_an_error_that_names_the_difference() -> None:
    with running() as (address, _), reader(address) as reading:
        with pytest.raises(ConfigError, match=r"parts\.1 is \[400\] there and \[9\] here"):
            reading.pull(Counting((7, 9, 33)))
        with pytest.raises(ConfigError, match="no weight"):
            reading.pull(nn.Linear(3, 3))


def test_buffers_of_the_run_come_too() -> None:
    with running(last_step=40) as (address, _), reader(address, shared_memory=False) as reading:
        model = Counting()
        for change in reading.follow(every_s=0.02):
            change.apply(model)
        assert 30 < float(model.seen) <= 40


def test_changes_since_a_version_that_is_known() -> None:
    with running() as (address, training), reader(address, shared_memory=False) as first:
        known = first.pull()
        training.unused = [1]
        while training.version < known + 20:
            time.sleep(0.01)
        settled = first.pull()
        with reader(address, shared_memory=False) as second:
            while training.version <= settled:
                time.sleep(0.01)
            change = next(second.changes(since=settled))
            assert change.variables.keys() == {"parts.0", "parts.2"} and not change.full
            model = Counting()
            version = second.pull(model)  # the rest is asked for when it is wanted
            assert bool((model.parts[0] == version).all()) and bool((model.parts[1] > 0).all())


def test_following_with_async_for() -> None:
    async def follow(address: str) -> list[int]:
        found: list[int] = []
        async with reader(address) as reading:
            async for change in reading.follow(every_s=0.02):
                found.append(int(change.version))
                if len(found) == 5:
                    return found
        return found

    with running() as (address, _):
        versions = asyncio.run(follow(address))
    assert len(versions) == 5 and versions == sorted(set(versions))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 4, sparse=True)
        self.users = tq.Table(3, init=tq.rows.Constant(0.5), optimizer=tq.rows.SGD(lr=1.0))
        nn.init.zeros_(self.words.weight)


def embed(training: Training) -> Callable[[Any], None]:
    """Every step adds 1 to the words of that step and takes 1 from its users."""

    def work(task: Any) -> None:
        torch.set_num_threads(1)
        model = Embedded()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        with tq.Session(task, model, optimizer, patience=PATIENCE) as session:
            while not session.should_stop() and not training.may_end.is_set():
                step = session.local_step
                optimizer.zero_grad()
                loss = model.users(torch.tensor([step])).sum() - model.words(torch.arange(50)).sum()
                loss.backward()
                optimizer.step()
                training.version = optimizer.last.version
                time.sleep(training.pause_s)

    return work


@pytest.mark.parametrize("ps", [1, 2])
def test_rows_are_of_one_version(ps: int) -> None:
    cluster = Cluster(ps=ps, sockets=True)
    training = Training(cluster)
    thread = threading.Thread(target=lambda: cluster.run(embed(training)), name="torchquorum-test-run")
    thread.start()
    try:
        with reader(cluster.spec.address(TaskId("ps", 0))) as reading:
            for _ in range(10):
                found, version = reading.rows_and_version({"words.weight": torch.arange(60), "users": [[0, 10**12]]})
                assert bool((found["words.weight"][:50] == version).all()) and not found["words.weight"][50:].any()
                assert found["users"].shape == (1, 2, 3) and bool((found["users"][0, 1] == 0.5).all())
            model = Embedded()
            version = reading.pull(model)
            assert bool((model.words.weight[:50] == version).all()) and not model.words.weight[50:].any()
            assert bool((model.users(torch.tensor([10**12])) == 0.5).all())  # the table asks this reader
            assert bool((model.users(torch.tensor([0])) == -0.5).all())
            with pytest.raises(ConfigError, match="has no table nothing; it has users, words.weight"):
                reading.rows("nothing", [1])
            with pytest.raises(Exception, match="from 0 to 499"):
                reading.rows("words.weight", [500])
    finally:
        training.may_end.set()
        thread.join(60)


def test_rows_that_changed_are_sent_and_no_others() -> None:
    cluster = Cluster(sockets=True)
    training = Training(cluster)
    training.pause_s = 0.02
    thread = threading.Thread(target=lambda: cluster.run(embed(training)), name="torchquorum-test-run")
    thread.start()
    try:
        with reader(cluster.spec.address(TaskId("ps", 0))) as reading:
            model, users = Embedded(), dict[int, torch.Tensor]()
            following = reading.follow(every_s=0.05)
            first = next(following)
            assert first.full and len(first.rows["words.weight"].keys) == 500
            first.apply(model)
            before, changed = reading.received_bytes, 0
            for _ in range(8):
                change = next(following)
                change.apply(model)
                rows = change.rows
                assert rows["words.weight"].keys.tolist() == list(range(50))
                users.update(zip(rows["users"].keys.tolist(), rows["users"].rows, strict=True))
                changed += sum(8 * len(r.keys) + r.rows.nbytes for r in rows.values())
                assert bool((model.words.weight[:50] == change.version).all())
            assert all(bool((row == -0.5).all()) for row in users.values()) and users
            assert reading.received_bytes - before < 1.1 * changed + 8 * 200
    finally:
        training.may_end.set()
        thread.join(60)
