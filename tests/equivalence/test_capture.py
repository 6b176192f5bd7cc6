"""A captured step does what the four lines of an ordinary loop do; on the CPU it is that loop, on a GPU a CUDA graph."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import ConfigError
from torchquorum.session.join import Task

pytestmark = pytest.mark.library_keeps_sockets  # of pipes and sockets: those that CUDA opens once
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
ON_GPU = Path(__file__).parent.parent / "process" / "on_gpu.py"
STEPS = 12


class Unused(nn.Module):
    """A model with a layer that no batch goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Looks(nn.Module):
    """A model that looks at its own values, which a graph cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return out * 2 if out.abs().max().item() > 1e6 else out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def channels_last() -> nn.Module:
    net = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2), nn.Flatten())
    return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def batches(count: int, rows: Callable[[int], int] = lambda _: 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for k in range(count):
        x = torch.randn(rows(k), 8, generator=generator, dtype=torch.float64)
        found.append((x, torch.randint(0, 3, (rows(k),), generator=generator)))
    return found


def inner(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"momentum": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.01}}.get(kind, {"lr": 0.1})
    return getattr(torch.optim, {"momentum": "SGD"}.get(kind, kind))(model.parameters(), **options)


def plain(make: Callable[[], nn.Module], kind: str, data: list[Any], device: str) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = make().to(device, torch.float64)
    optimizer, losses = inner(kind, model), []
    for x, y in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().cpu() for name, value in model.state_dict().items()}


def captured(
    make: Callable[[], nn.Module], kind: str, data: list[Any], device: str, **cluster: Any
) -> tuple[list[float], Any, tq.types.CapturedStep]:
    def work(task: Task) -> Any:
        torch.manual_seed(0)
        model = make().to(device, torch.float64)
        optimizer = tq.Optimizer(inner(kind, model), rule=tq.Async())
        step = tq.capture(lambda x, y: cross_entropy(model(x.to(device)), y.to(device)), optimizer)
        with tq.Session(task, model, optimizer, last_step=len(data), patience=PATIENCE):
            losses = [step(x, y) for x, y in data]
        return losses, {name: value.detach().cpu() for name, value in model.state_dict().items()}, step

    return Cluster(**cluster).run(work)[0]


def assert_same(ours: tuple[list[float], Any, Any], theirs: tuple[list[float], Any]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adam"])
@pytest.mark.parametrize("make", [mlp, norm, Unused, channels_last])
def test_a_captured_step_is_the_ordinary_loop(make: Callable[[], nn.Module], kind: str, device: str) -> None:
    data = batches(STEPS)
    ours = captured(make, kind, data, device)
    assert_same(ours, plain(make, kind, data, device))
    assert ours[2].captured is (device == "cuda")
    assert ours[2].why_not == ""


@pytest.mark.parametrize("device", DEVICES)
def test_over_tcp_and_several_ps_tasks_too(device: str) -> None:
    data = batches(STEPS)
    assert_same(captured(mlp, "Adam", data, device, ps=2, transport="tcp"), plain(mlp, "Adam", data, device))


@needs_gpu
def test_a_model_that_looks_at_its_values_goes_on_uncaptured_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    data = batches(STEPS)
    ours = captured(Looks, "SGD", data, "cuda")
    assert_same(ours, plain(Looks, "SGD", data, "cuda"))
    assert not ours[2].captured and ours[2].why_not
    assert capsys.readouterr().err.count("cannot be captured as a CUDA graph") == 1


@needs_gpu
def test_after_a_step_that_cannot_be_captured_random_numbers_are_drawn_as_before() -> None:
    def work(task: Task) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(Looks(), nn.Dropout(0.5), nn.Linear(3, 3)).double().cuda()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        step = tq.capture(lambda x, y: cross_entropy(model(x), y), optimizer)
        x, y = batches(1)[0]
        with tq.Session(task, model, optimizer, last_step=STEPS, patience=PATIENCE):
            losses = [step(x, y) for _ in range(STEPS)]
        assert step.why_not and not step.captured
        return losses

    losses = Cluster().run(work)[0]
    assert len(set(losses[-5:])) == 5 and torch.rand(3, device="cuda").unique().numel() == 3


@needs_gpu
def test_batches_of_several_sizes_each_get_their_graph() -> None:
    data = batches(24, rows=lambda k: (12, 7)[k % 2])
    ours = captured(mlp, "SGD", data, "cuda")
    assert_same(ours, plain(mlp, "SGD", data, "cuda"))
    assert ours[2].captured


@needs_gpu
def test_dropout_draws_anew_in_every_replay() -> None:
    def work(task: Task) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double().cuda()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        step = tq.capture(lambda x, y: cross_entropy(model(x), y), optimizer)
        x, y = batches(1)[0]
        with tq.Session(task, model, optimizer, last_step=STEPS, patience=PATIENCE):
            return [step(x, y) for _ in range(STEPS)]

    losses = Cluster().run(work)[0]
    assert len(set(losses[-5:])) == 5


@needs_gpu
def test_a_parameter_changed_by_hand_is_noticed_and_one_that_was_changed_back_is_not() -> None:
    """The ps owns the variables: what a worker does to its own copy is an error at the next step."""
    data = batches(STEPS)

    def work(task: Task) -> Any:
        torch.manual_seed(0)
        model = mlp().double().cuda()
        optimizer = tq.Optimizer(inner("SGD", model))
        step = tq.capture(lambda x, y: cross_entropy(model(x), y), optimizer)
        with tq.Session(task, model, optimizer, last_step=STEPS, patience=PATIENCE):
            for k, (x, y) in enumerate(data):
                step(x, y)
                before = [p.detach().clone() for p in model.parameters()]
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(1.0)
                    for p, value in zip(model.parameters(), before, strict=True):
                        p.copy_(value + (1.0 if k == 5 else 0.0))
                if k == 5:
                    optimizer.zero_grad()
                    optimizer.step()

    with pytest.raises(ConfigError, match="written to inside the run"):
        Cluster().run(work)


@needs_gpu
@pytest.mark.parametrize("rule", ["async", "sync"])
def test_workers_on_one_gpu_learn_together(rule: str) -> None:
    command = [sys.executable, "-m", "torchquorum.cli.main", "run", "--workers", "2", str(ON_GPU), rule]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.findall(r"first (\S+) last (\S+) captured True on the fast path True", done.stdout)
    assert done.returncode == 0 and len(found) == 2, done.stdout + done.stderr
    for first, last in found:
        assert float(last) < float(first) / 2


@needs_gpu
def test_a_gradient_that_is_not_finite_is_refused() -> None:
    def work(task: Task) -> tuple[str, bool]:
        torch.manual_seed(0)
        model = mlp().double().cuda()
        optimizer = tq.Optimizer(inner("SGD", model))
        step = tq.capture(lambda x, y: cross_entropy(model(x), y), optimizer)
        reason = ""
        with tq.Session(task, model, optimizer, last_step=STEPS, patience=PATIENCE):
            for k, (x, y) in enumerate(batches(STEPS + 1)):
                step(x * float("inf") if k == 8 else x, y)
                reason = optimizer.last.reason if k == 8 else reason
        return reason, all(bool(torch.isfinite(p).all()) for p in model.parameters())

    assert Cluster().run(work)[0] == ("not finite", True)


def test_arguments_of_another_kind_are_refused() -> None:
    model = mlp()
    with pytest.raises(ConfigError, match=r"tq\.Optimizer"):
        tq.capture(lambda x: model(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))  # pyright: ignore
    with pytest.raises(ConfigError, match="computes the loss"):
        tq.capture(model(torch.zeros(1, 8)), tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))  # pyright: ignore
