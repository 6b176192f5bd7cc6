"""Several workers, several shards, either transport: the same result as one process."""

import threading

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import OPTIMIZERS, Net, backward, plain, same
from tests.harness import PATIENCE, Cluster, train
from torchquorum.session.join import Task


def batch(index: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(size, 37, generator=generator), torch.randint(0, 5, (size,), generator=generator)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_sync_with_n_workers_equals_one_process_on_the_joined_batch(workers: int, name: str) -> None:
    def share(model: nn.Module, worker: int, step: int) -> None:
        x, y = batch(step, 8 * workers)
        mine = slice(8 * worker, 8 * worker + 8)
        nn.functional.cross_entropy(model(x[mine], step % 3 != 1), y[mine]).backward()

    ours, steps = train(Net, OPTIMIZERS[name], share, steps=8, workers=workers)
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    for step in range(8):
        x, y = batch(step, 8 * workers)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, step % 3 != 1), y).backward()
        optimizer.step()
    for a, b in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), atol=2e-6, rtol=1e-4)
    assert [s.version for s in steps] == list(range(1, 9))


def one_worker_without(model: nn.Module, worker: int, step: int) -> None:
    """Worker 1 never uses the branch; its zeros count in the mean, as in a joined batch."""
    x, y = batch(step, 16)
    mine = slice(8 * worker, 8 * worker + 8)
    nn.functional.cross_entropy(model(x[mine], worker == 0), y[mine]).backward()


def test_a_gradient_that_one_worker_lacks_counts_as_zero() -> None:
    ours, _ = train(Net, OPTIMIZERS["adam"], one_worker_without, steps=6, workers=2)
    model = Net()
    optimizer = OPTIMIZERS["adam"](model)
    for step in range(6):
        x, y = batch(step, 16)
        optimizer.zero_grad()
        losses = [
            nn.functional.cross_entropy(model(x[:8], True), y[:8]),
            nn.functional.cross_entropy(model(x[8:], False), y[8:]),
        ]
        torch.stack(losses).mean().backward()
        optimizer.step()
    for a, b in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), atol=2e-6, rtol=1e-4)


PLACES = [
    {"ps": 2},
    {"ps": 3, "placement": "greedy"},
    {"ps": 2, "slice_bytes": 1000},
    {"ps": 4, "slice_bytes": 1},
    {"ps": 12},
]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", ["sgd", "adam", "groups"])
def test_several_shards_equal_one(place: dict, name: str) -> None:
    ours, _ = train(Net, OPTIMIZERS[name], backward, steps=6, **place)
    assert same(ours, plain(OPTIMIZERS[name], steps=6))


@pytest.mark.parametrize("place", PLACES[:3], ids=str)
def test_several_shards_and_workers_equal_one_shard(place: dict) -> None:
    one, _ = train(Net, OPTIMIZERS["momentum"], backward, steps=6, workers=3)
    several, _ = train(Net, OPTIMIZERS["momentum"], backward, steps=6, workers=3, **place)
    assert same(one, several)


@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_frames_equal_shared_memory(ps: int, workers: int) -> None:
    schedule = tq.ExponentialDecay(decay_steps=3, decay_rate=0.5)
    options = {"steps": 6, "ps": ps, "workers": workers, "schedule": schedule}
    shared, _ = train(Net, OPTIMIZERS["adam"], backward, transport="shm", **options)
    framed, _ = train(Net, OPTIMIZERS["adam"], backward, transport="tcp", **options)
    assert same(shared, framed)


class Counter(nn.Module):
    """One large vector whose gradient is minus one everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(50_000))


@pytest.mark.parametrize(("ps", "transport"), [(1, "shm"), (2, "shm"), (1, "tcp")])
def test_concurrent_pushes_of_ones_sum_exactly(ps: int, transport: str) -> None:
    workers, steps = 4, 1500
    cluster = Cluster(ps=ps, workers=workers, transport=transport)
    mixed: list[str] = []

    def work(task: Task) -> tuple[torch.Tensor, int]:
        model = Counter()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = tq.Optimizer(inner, rule=tq.Async(), slice_bytes=1000)
        model.count.grad = -torch.ones(50_000)
        with tq.Session(task, model, optimizer, last_step=steps, patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.step()
                step = optimizer.last
                low, high = int(model.count.min()), int(model.count.max())
                if not low == high == step.version:
                    mixed.append(f"version {step.version} holds {low} to {high}")
            session.pull()
            return model.count.detach().clone(), session.local_step

    results = cluster.run(*[work] * workers)
    assert mixed == []
    for count, _ in results:
        assert torch.equal(count, torch.full((50_000,), float(steps)))
    assert sum(local for _, local in results) >= steps
    assert cluster.servers[0].service.life.tally.updates == steps


def test_async_stops_exactly_at_the_last_step_and_says_so() -> None:
    cluster = Cluster(workers=3)

    def work(task: Task) -> list[tq.types.Step]:
        model = Net()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule=tq.Async())
        seen = []
        with tq.Session(task, model, optimizer, last_step=50, patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                backward(model, task.index, session.local_step)
                optimizer.step()
                seen.append(optimizer.last)
        return seen

    steps = [s for seen in cluster.run(*[work] * 3) for s in seen]
    assert sum(bool(s.accepted) for s in steps) == 50
    assert {s.reason for s in steps if not s.accepted} <= {"past last step"}
    assert max(s.version for s in steps) == 50


def test_a_pipelined_worker_loses_nothing_and_is_one_version_behind() -> None:
    cluster = Cluster()

    def work(task: Task) -> tuple[torch.Tensor, list[tq.types.Step]]:
        model = Counter()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Async(pipeline=True))
        model.count.grad = -torch.ones(50_000)
        seen = []
        with tq.Session(task, model, optimizer, last_step=40, patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.step()
                seen.append(optimizer.last)
            session.pull()
        return model.count.detach(), seen

    [(count, steps)] = cluster.run(work)
    assert torch.equal(count, torch.full((50_000,), 40.0))
    assert max(s.staleness for s in steps) == 1


def test_a_late_worker_joins_and_both_then_count_once() -> None:
    cluster = Cluster(workers=2)
    halfway, joined = threading.Event(), threading.Event()

    def work(task: Task) -> list[tuple[int, int]]:
        model = Counter()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Sync())
        model.count.grad = -torch.ones(50_000)
        if task.index == 1:
            assert halfway.wait(20)
        seen = []
        with tq.Session(task, model, optimizer, last_step=200, patience=PATIENCE) as session:
            if task.index == 1:
                joined.set()
            while not session.should_stop():
                optimizer.step()
                step = optimizer.last
                seen.append((step.local_step, step.version))
                if step.version == 50 and not halfway.is_set():
                    halfway.set()
                    assert joined.wait(20)
        return seen

    chief, late = cluster.run(work, work)
    alone = [entry for entry in chief if entry[1] <= 50]
    assert alone[-1][0] in (100, 101)  # a lone worker gives both gradients of every update
    together = late[-1][0] / (200 - late[0][1] + 1)
    assert together == pytest.approx(1.0, abs=0.05)  # then each gives one
