"""Every preset with one worker equals plain torch.optim, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import train

STEPS = 12


class Net(nn.Module):
    """Odd sizes, so that vector tails are exercised; a branch that some steps leave out; a tied and a frozen part."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(37, 53, dtype=dtype)
        self.sometimes = nn.Linear(53, 53, dtype=dtype)
        self.last = nn.Linear(53, 5, dtype=dtype)
        self.tied = nn.Linear(53, 5, dtype=dtype)
        self.tied.weight = self.last.weight
        self.frozen = nn.Linear(53, 53, dtype=dtype)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        h = torch.relu(self.first(x))
        h = torch.tanh(self.frozen(h))
        if branch:
            h = torch.relu(self.sometimes(h))
        return self.last(h) + self.tied(h)


def backward(model: nn.Module, worker: int, step: int) -> None:
    """The gradients of a batch that only depends on worker and step."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(11, 37, generator=generator).to(dtype)
    y = torch.randint(0, 5, (11,), generator=generator)
    nn.functional.cross_entropy(model(x, step % 3 != 1).float(), y).backward()


def plain(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_model: Callable[[], nn.Module] = Net,
    steps: int = STEPS,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    accumulate: int = 1,
) -> list[torch.Tensor]:
    """The same training in plain PyTorch."""
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = schedule(optimizer) if schedule else None
    batch = 0
    for _ in range(steps):
        optimizer.zero_grad()
        if accumulate == 1:
            backward(model, 0, batch)
        else:
            sums: list[Any] = [None] * len(list(model.parameters()))
            for k in range(accumulate):
                model.zero_grad()
                backward(model, 0, batch + k)
                for i, p in enumerate(model.parameters()):
                    if p.grad is not None:
                        sums[i] = p.grad.clone() if sums[i] is None else sums[i] + p.grad
            for p, total in zip(model.parameters(), sums, strict=True):
                p.grad = None if total is None else total / accumulate
        batch += accumulate
        optimizer.step()
        if scheduler:
            scheduler.step()
    return [p.detach() for p in model.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "weight decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=1e-2, maximize=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, betas=(0.8, 0.95)),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, lr_decay=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, momentum=0.5, centered=True),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "groups": lambda m: torch.optim.SGD(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in m.parameters() if p.dim() == 1], "lr": 0.3, "momentum": 0.7},
        ],
        lr=0.1,
    ),
    "adam groups": lambda m: torch.optim.Adam(
        [
            {"params": [p for p in m.parameters() if p.dim() == 1], "lr": 0.03},
            {"params": [p for p in m.parameters() if p.dim() > 1], "betas": (0.5, 0.9)},
        ]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_equals_plain_torch_optim(name: str) -> None:
    ours, _ = train(Net, OPTIMIZERS[name], backward, steps=STEPS)
    assert same(ours, plain(OPTIMIZERS[name]))


@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async(), tq.Bounded(2), tq.Buffered(1), tq.Sync(aggregate=1)], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_every_preset_with_one_worker_equals_plain_torch_optim(rule: tq.Rule, name: str) -> None:
    ours, steps = train(Net, OPTIMIZERS[name], backward, steps=STEPS, rule=rule)
    assert same(ours, plain(OPTIMIZERS[name]))
    assert all(step.accepted and step.staleness == 0 for step in steps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "rmsprop"])
def test_other_dtypes_equal_plain_torch_optim(dtype: torch.dtype, name: str) -> None:
    ours, _ = train(lambda: Net(dtype), OPTIMIZERS[name], backward, steps=STEPS)
    assert same(ours, plain(OPTIMIZERS[name], lambda: Net(dtype)))


class Mixed(Net):
    """Two dtypes in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = self.sometimes.to(torch.float64)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        h = torch.relu(self.first(x))
        if branch:
            h = torch.relu(self.sometimes(h.double())).float()
        return self.last(h) + self.tied(h)


@pytest.mark.parametrize("name", ["sgd", "adam", "groups"])
def test_a_model_of_two_dtypes_equals_plain_torch_optim(name: str) -> None:
    ours, _ = train(Mixed, OPTIMIZERS[name], backward, steps=STEPS)
    assert same(ours, plain(OPTIMIZERS[name], Mixed))


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_buffered_equals_k_accumulated_batches(k: int, name: str) -> None:
    ours, _ = train(Net, OPTIMIZERS[name], backward, steps=6, rule=tq.Buffered(k))
    assert same(ours, plain(OPTIMIZERS[name], steps=6, accumulate=k))


def test_a_lone_worker_fills_the_quorum_with_accumulated_batches() -> None:
    ours, steps = train(Net, OPTIMIZERS["sgd"], backward, steps=6, rule=tq.Sync(aggregate=2))
    assert same(ours, plain(OPTIMIZERS["sgd"], steps=6, accumulate=2))
    assert [s.version for s in steps] == [*[v for v in range(6) for _ in range(2)][1:], 6]


SCHEDULES = {
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 5], "gamma": 0.1},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 10},
    "LinearLR": {"total_iters": 5},
    "PolynomialLR": {"total_iters": 8, "power": 2.0},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 20},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "ConstantLR": {"factor": 0.25, "total_iters": 4},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_schedules_by_name_equal_torch_schedulers(name: str, optimizer: str) -> None:
    if name in ("OneCycleLR", "CyclicLR") and optimizer == "sgd":
        pytest.skip("this schedule cycles the momentum, so its optimizer must have one")
    kind = getattr(torch.optim.lr_scheduler, name)
    ours, _ = train(Net, OPTIMIZERS[optimizer], backward, steps=STEPS, schedule=tq.schedule(name, **SCHEDULES[name]))
    assert same(ours, plain(OPTIMIZERS[optimizer], schedule=lambda o: kind(o, **SCHEDULES[name])))


def test_nested_schedules_equal_torch_schedulers() -> None:
    lr = torch.optim.lr_scheduler
    schedule = tq.schedule(
        "SequentialLR",
        schedulers=[tq.schedule("LinearLR", total_iters=4), tq.schedule(lr.ExponentialLR, gamma=0.5)],
        milestones=[4],
    )
    ours, _ = train(Net, OPTIMIZERS["sgd"], backward, steps=STEPS, schedule=schedule)
    theirs = plain(
        OPTIMIZERS["sgd"],
        schedule=lambda o: lr.SequentialLR(o, [lr.LinearLR(o, total_iters=4), lr.ExponentialLR(o, gamma=0.5)], [4]),
    )
    assert same(ours, theirs)


@pytest.mark.parametrize("staircase", [False, True])
def test_exponential_decay_is_that_of_the_seeds(staircase: bool) -> None:
    schedule = tq.ExponentialDecay(decay_steps=5, decay_rate=0.9, staircase=staircase)
    _, steps = train(Net, OPTIMIZERS["sgd"], backward, steps=STEPS, schedule=schedule)
    expected = [0.1 * 0.9 ** (k // 5 if staircase else k / 5) for k in range(1, STEPS + 1)]
    assert [s.lr for s in steps] == pytest.approx(expected, abs=1e-12)
