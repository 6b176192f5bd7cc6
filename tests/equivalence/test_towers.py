"""Towers: several batches at once in one worker give the update of the joined batch."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchquorum as tq
from tests.equivalence.test_one_worker import same
from tests.harness import PATIENCE, Cluster, train
from torchquorum.jobs.models import CNN, MLP
from torchquorum.session.join import Task
from torchquorum.towers.tower_mean import TowerSum

# The CPU under other numbers: to torch the same, to towers devices of their own with copies of the model.
CPU_1, CPU_2 = torch.device("cpu", 1), torch.device("cpu", 2)


class Tied(nn.Module):
    """Two layers that share one weight, a scalar, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.scale, self.frozen = nn.Parameter(torch.tensor(1.5)), nn.Linear(12, 12)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.frozen(self.first(x)))) * self.scale


class Branching(nn.Module):
    """A branch that not every batch uses, and a layer that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.unused = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        return x + self.branch(x) if branch else x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x.view(len(x), -1, 4))[0][:, -1])


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (MLP, 784),
    "cnn": (lambda: CNN(dropout=0.0), 784),
    "channels_last": (lambda: CNN(dropout=0.0).to(memory_format=torch.channels_last), 784),  # pyright: ignore[reportCallIssue]
    "tied and frozen": (Tied, 12),
    "lstm": (Recurrent, 12),
    "bfloat16": (lambda: Tied().to(torch.bfloat16), 12),
    "two dtypes": (lambda: nn.Sequential(nn.Linear(12, 12), Cast(torch.float64), nn.Linear(12, 10).double()), 12),
    "sparse embedding": (lambda: nn.Sequential(Indices(), nn.Embedding(20, 10, sparse=True), nn.Flatten()), 12),
}


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


class Indices(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, 0].abs() * 7).long() % 20


def made(name: str) -> nn.Module:
    torch.manual_seed(4)
    return MODELS[name][0]()


def batch(model: nn.Module, width: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    return torch.randn(size, width, generator=generator).to(dtype), torch.randint(0, 10, (size,), generator=generator)


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x).float(), y)


def close(ours: torch.Tensor, theirs: torch.Tensor, name: str, atol: float = 2e-6, rtol: float = 1e-4) -> None:
    if name == "bfloat16":
        atol = rtol = 3e-2
    torch.testing.assert_close(ours.detach().to_dense(), theirs.detach().to_dense(), atol=atol, rtol=rtol)


PLACES = {
    "two on one": ["/cpu:0", "/job:worker/task:0/device:CPU:0"],
    "four on one": ["/cpu:0"] * 4,
    "one on the model's device, one elsewhere": ["/cpu:0", CPU_1],
    "none on the model's device": [CPU_1, CPU_2, CPU_1, CPU_2],
}


@pytest.mark.parametrize("devices", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("name", MODELS)
def test_towers_equal_the_joined_batch(name: str, devices: Sequence[Any]) -> None:
    ours, joined, width = made(name), made(name), MODELS[name][1]
    regularize = tq.tensorflow.l2_regularizer(1e-2) if name == "mlp" else None
    towers = tq.Towers(ours, devices)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.2) for m in (ours, joined)]
    for step in range(2):
        x, y = batch(ours, width, step, 16)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = towers.backward(loss_fn, towers.split(x, y), regularizer=regularize)
        expected = loss_fn(joined, x, y) + (regularize(joined) if regularize else 0.0)
        expected.backward()
        close(loss, expected, name)
        for p, q in zip(ours.parameters(), joined.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None and q.grad is not None:
                close(p.grad, q.grad, name)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours.parameters(), joined.parameters(), strict=True):
        close(p, q, name)


@pytest.mark.parametrize("name", MODELS)
def test_where_the_towers_are_does_not_change_a_bit(name: str) -> None:
    found = []
    for devices in (["/cpu:0"] * 3, [CPU_1, CPU_2, CPU_1], [CPU_2, "cpu:0", "cpu:0"]):
        model = made(name)
        towers = tq.Towers(model, devices)
        x, y = batch(model, MODELS[name][1], 1, 12)
        towers.backward(loss_fn, towers.split(x, y))
        found.append([p.grad.to_dense() if p.grad is not None else torch.zeros(()) for p in model.parameters()])
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_a_gradient_that_one_tower_lacks_counts_as_zero_and_one_that_all_lack_is_none() -> None:
    torch.manual_seed(0)
    model, plain = Branching(), Branching()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 12), torch.randint(0, 10, (8,))

    def with_branch(net: nn.Module, x: torch.Tensor, y: torch.Tensor, branch: bool) -> torch.Tensor:
        return functional.cross_entropy(net(x, branch), y)

    towers = tq.Towers(model, ["/cpu:0", CPU_1])
    towers.backward(with_branch, [(x[:4], y[:4], True), (x[4:], y[4:], False)])
    losses = [with_branch(plain, x[:4], y[:4], True), with_branch(plain, x[4:], y[4:], False)]
    torch.stack(losses).mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name.startswith("unused"):
            assert p.grad is None
        else:
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p.grad, q.grad)


def test_two_towers_give_the_bits_that_two_workers_would() -> None:
    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(37, 53), nn.ReLU(), nn.Linear(53, 10))

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def share(model: nn.Module, worker: int, step: int) -> None:
        x, y = batch(model, 37, step, 20)
        loss_fn(model, *(part[10 * worker : 10 * worker + 10] for part in (x, y))).backward()

    def both(model: nn.Module, worker: int, step: int) -> None:
        towers = tq.Towers(model, ["/cpu:0", CPU_1])
        towers.backward(loss_fn, towers.split(*batch(model, 37, step, 20)))

    by_workers, _ = train(make, adam, share, steps=6, workers=2)
    by_towers, steps = train(make, adam, both, steps=6)
    assert same(by_workers, by_towers)
    assert [s.version for s in steps] == list(range(1, 7))  # once per step, not per tower


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "two workers"])
def test_workers_with_towers_equal_one_process_on_the_joined_batch(alone: bool) -> None:
    workers = 1 if alone else 2
    regularize = tq.tensorflow.l2_regularizer(1e-3)
    all_in = threading.Barrier(workers)
    models = [made("mlp") for _ in range(workers)]

    def work(task: Task) -> Any:
        model = models[task.index]
        towers = tq.Towers(model, ["/cpu:0", CPU_1])  # made before the session moves the parameters
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, last_step=4, patience=PATIENCE) as session:
            all_in.wait(20)
            while not session.should_stop():
                x, y = batch(model, 784, session.global_step, 24)
                mine = slice(24 // workers * task.index, 24 // workers * (task.index + 1))
                optimizer.zero_grad()
                loss = towers.backward(loss_fn, towers.split(x[mine], y[mine]), regularizer=regularize)
                optimizer.step(loss=loss)
        return [p.detach().clone() for p in model.parameters()]

    ours = work(tq.join([])) if alone else Cluster(workers=2).run(work, work)[0]
    joined = made("mlp")
    optimizer = torch.optim.SGD(joined.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(joined, 784, step, 24)
        (loss_fn(joined, x, y) + regularize(joined)).backward()
        optimizer.step()
    for p, q in zip(ours, joined.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach(), atol=2e-6, rtol=1e-4)


def test_the_sum_has_the_order_of_the_towers_and_is_divided_once() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    total = TowerSum()
    for part in parts:
        total.add([part.clone()])
    [mean] = total.mean()
    assert mean is not None and mean.item() == ((parts[0] + parts[1]) + parts[2]).div(3).item() == 0.0


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_cuda
@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    "devices", [["/gpu:0", "/gpu:0"], ["/gpu:0", "/cpu:0"], ["cpu:0", "cuda:0", "cuda:0"]], ids=str
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "tied and frozen", "lstm", "bfloat16", "two dtypes"])
def test_towers_on_a_gpu_equal_the_joined_batch(
    name: str, devices: list[Any], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # ten bits of mantissa are not what is tested
    ours, joined, width = made(name).to(home), made(name).to(home), MODELS[name][1]
    towers = tq.Towers(ours, devices)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (ours, joined)]
    for step in range(2):
        x, y = batch(ours, width, step, 24)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = towers.backward(loss_fn, towers.split(x, y))
        loss_fn(joined, x.to(home), y.to(home)).backward()
        for p, q in zip(ours.parameters(), joined.parameters(), strict=True):
            assert p.device == q.device and (p.grad is None) == (q.grad is None)
            if p.grad is not None and q.grad is not None:
                close(p.grad, q.grad, name, atol=1e-3, rtol=1e-2)
        for optimizer in optimizers:
            optimizer.step()
        assert loss.device == next(ours.parameters()).device


@needs_cuda
def test_two_towers_that_share_a_gpu_train_alone_as_the_joined_batch() -> None:
    def trained(joined: bool) -> list[torch.Tensor]:
        model = made("mlp").to("cuda:0")
        towers = tq.Towers(model, ["/gpu:0"] if joined else ["/gpu:0", "/gpu:0"])
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with tq.Session(tq.join([]), model, optimizer, last_step=5) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                pair = towers.split(*batch(model, 784, session.global_step, 64))
                optimizer.step(loss=towers.backward(loss_fn, pair))
        return [p.detach().cpu().clone() for p in model.parameters()]

    for p, q in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["mlp", "cnn", "two dtypes"])
def test_towers_on_two_gpus_equal_the_joined_batch(name: str) -> None:
    ours, joined, width = made(name).to("cuda:0"), made(name).to("cuda:0"), MODELS[name][1]
    towers = tq.Towers(ours)
    assert [d.index for d in towers.devices[:2]] == [0, 1]
    x, y = batch(ours, width, 0, 8 * len(towers))
    towers.backward(loss_fn, towers.split(x, y))
    loss_fn(joined, x.to("cuda:0"), y.to("cuda:0")).backward()
    for p, q in zip(ours.parameters(), joined.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, atol=1e-3, rtol=1e-2)
