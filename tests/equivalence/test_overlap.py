"""Gradients that leave the GPU during the backward pass make the same versions, bit for bit, as those that leave after it."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.session.join import Task
from torchquorum.wire.messages import Plan
from torchquorum.worker import overlap as early
from torchquorum.worker import track_member
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.fastpath import can_use_fastpath
from torchquorum.worker.overlap import Overlap

pytestmark = pytest.mark.library_keeps_sockets  # of pipes and sockets: those that CUDA opens once
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
STEPS, WIDTH = 10, 64
Loop = Callable[[nn.Module, tq.Optimizer, torch.Tensor, torch.Tensor, int], object]


def make(device: str) -> nn.Module:
    layers = [nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)]
    model, generator = nn.Sequential(*layers), torch.Generator().manual_seed(0)
    for p in model.parameters():  # several workers are threads, which share torch's own generator
        p.data.normal_(0.0, 0.05, generator=generator)
    return model.to(device)


def batches(count: int, device: str, seed: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x, y = torch.randn(12, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)
        found.append((x.to(device), y.to(device)))
    return found


def hooks_on(model: nn.Module) -> set[int]:
    return {len(getattr(p, "_post_accumulate_grad_hooks", None) or {}) for p in model.parameters()}


def ordinary(model: nn.Module, optimizer: tq.Optimizer, x: torch.Tensor, y: torch.Tensor, k: int) -> object:
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    return optimizer.step(loss=loss)


def changed(change: Callable[[nn.Module, int], object]) -> Loop:
    def loop(model: nn.Module, optimizer: tq.Optimizer, x: torch.Tensor, y: torch.Tensor, k: int) -> object:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        change(model, k)
        return optimizer.step()

    return loop


def accumulating(model: nn.Module, optimizer: tq.Optimizer, x: torch.Tensor, y: torch.Tensor, k: int) -> object:
    optimizer.zero_grad()
    for part in range(3):
        cross_entropy(model(x[part::3]), y[part::3]).backward()
    return optimizer.step()


def scaled(model: nn.Module, optimizer: tq.Optimizer, x: torch.Tensor, y: torch.Tensor, k: int) -> object:
    scaler = torch.amp.GradScaler(x.device.type, init_scale=256.0)
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    return optimizer.step()


def failing(model: nn.Module, optimizer: tq.Optimizer, x: torch.Tensor, y: torch.Tensor, k: int) -> object:
    if k == 4:
        hook = next(model.parameters()).register_hook(_fail)
        with pytest.raises(ArithmeticError):
            cross_entropy(model(x) * 3, y).backward()
        hook.remove()
    return ordinary(model, optimizer, x, y, k)


def _fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError("in the middle")


def _clip(model: nn.Module, k: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if k % 2 else 1e9)


def _by_data(model: nn.Module, k: int) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.clamp_(-1e-3, 1e-3)


def _none(model: nn.Module, k: int) -> None:
    if k % 3 == 1:
        model.zero_grad(set_to_none=True)


def _one_anew(model: nn.Module, k: int) -> None:
    first = next(model.parameters())
    first.grad = torch.ones_like(first) * k


class _Clipping(tq.Hook):
    """Clips just before the push, in every second step."""

    def before_run(self, session: tq.hooks.HookSession) -> None:
        _by_data(session.model, 0) if session.global_step % 2 else None


@dataclass(frozen=True)
class Run:
    """What is trained, and on what."""

    loop: Loop | None
    device: str
    kind: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    rule: Any = None
    hooks: tuple[Any, ...] = ()
    sessions: int = 1
    cluster: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> tuple[list[Any], list[int]]:
        """Returns the values of the model and the loss of captured steps, and how many gradients were held at each step."""
        held: list[int] = []
        real = Overlap.held

        def counting(this: Overlap) -> frozenset[int]:
            found = real(this)
            held.append(len(found))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Overlap, "held", counting)
            workers = self.cluster.get("workers", 1)
            made = [self._make() for _ in range(workers)]
            found: list[Any] = []
            for _ in range(self.sessions):
                found = Cluster(**self.cluster).run(*[partial(self._work, *of_worker) for of_worker in made])
        gc.collect()
        return found[0], held

    def _make(self) -> tuple[nn.Module, tq.Optimizer, tq.types.CapturedStep]:
        model = make(self.device)
        inner = getattr(torch.optim, self.kind)(model.parameters(), lr=0.01, **self.options)
        optimizer = tq.Optimizer(inner) if self.rule is None else tq.Optimizer(inner, rule=self.rule)
        return model, optimizer, tq.capture(lambda x, y: cross_entropy(model(x), y), optimizer)

    def _work(self, model: nn.Module, optimizer: tq.Optimizer, step: tq.types.CapturedStep, task: Task) -> list[Any]:
        losses = []
        wait_for = task.num_workers  # else the first rounds may be those of one worker
        with tq.Session(
            task,
            model,
            optimizer,
            last_step=STEPS,
            patience=PATIENCE,
            hooks=list(self.hooks),
            wait_for_workers=wait_for,
        ):
            for k, (x, y) in enumerate(batches(STEPS, self.device, 5 + task.index)):
                if self.loop is None:
                    losses.append(step(x, y))
                else:
                    self.loop(model, optimizer, x, y, k)
        assert self.loop is not None or step.captured is (self.device == "cuda")
        assert hooks_on(model) == {0}
        return [*losses, *(p.detach().cpu() for p in model.parameters())]


def both(monkeypatch: pytest.MonkeyPatch, run: Run) -> list[int]:
    """Trains with and without early copies, compares, and returns how many gradients were held at each step."""
    monkeypatch.setattr(early, "LEAST_PIECE_BYTES", 0)
    monkeypatch.setattr(early, "LEAST_BYTES", 1 << 60)
    late, none = run()
    assert none == []
    monkeypatch.setattr(early, "LEAST_BYTES", 0)
    if run.device == "cpu":  # where nothing is gained; here it stands in for a GPU, with copies that are made at once
        monkeypatch.setattr(Exchange, "copy_early", at_once)
        monkeypatch.setattr(track_member, "can_use_fastpath", as_on_a_gpu)
    values, held = run()
    for ours, theirs in zip(values, late, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    return held


def as_on_a_gpu(plan: Plan, *, on_gpu: bool) -> bool:
    """A worker on the CPU makes those updates itself that one with a GPU would."""
    assert not on_gpu
    return can_use_fastpath(plan, on_gpu=True)


def at_once(exchange: Exchange, may: Callable[[], bool]) -> None:
    exchange.begin_overlap(may)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (ordinary, [6] * STEPS),
        (accumulating, [0] + [6] * (STEPS - 1)),
        (changed(_clip), [6, 0] * (STEPS // 2)),
        (changed(_by_data), [0] * STEPS),
        (changed(_none), [6, 0, 6] * (STEPS // 3) + [6]),
        (changed(_one_anew), [5] * STEPS),
        (scaled, [0] * STEPS),
        (failing, None),
    ],
    ids=["ordinary", "accumulating", "clip", "data", "none", "anew", "scaler", "failing"],
)
def test_versions_are_the_same(
    monkeypatch: pytest.MonkeyPatch, loop: Loop, expected: list[int] | None, device: str
) -> None:
    held = both(monkeypatch, Run(loop, device))
    assert held == expected if expected is not None else held.count(6) >= STEPS - 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sessions", [1, 2])
def test_captured_steps_are_the_same_and_those_before_the_capture_are_early(
    monkeypatch: pytest.MonkeyPatch, sessions: int, device: str
) -> None:
    held = both(monkeypatch, Run(None, device, sessions=sessions))
    assert held[:3] == [6] * 3 and len(held) == sessions * STEPS
    assert device == "cpu" or held[3:STEPS] == [0] * (STEPS - 3)


@needs_gpu
@pytest.mark.parametrize(
    "loop", [ordinary, changed(_clip), changed(_none), None], ids=["ordinary", "clip", "none", "captured"]
)
def test_a_slow_side_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch, loop: Loop | None) -> None:
    real = Overlap.copy_out

    def slow(self: Overlap, variable: int, sent: torch.Tensor) -> None:
        torch.cuda._sleep(20_000_000)
        real(self, variable, sent)

    monkeypatch.setattr(Overlap, "copy_out", slow)
    assert max(both(monkeypatch, Run(loop, "cuda"))) == 6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_several_ps_tasks_and_frames_too(monkeypatch: pytest.MonkeyPatch, kind: str, device: str) -> None:
    run = Run(ordinary, device, kind=kind, cluster={"ps": 2, "transport": "tcp"})
    assert both(monkeypatch, run) == [6] * STEPS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_rounds_of_two_workers_too(monkeypatch: pytest.MonkeyPatch, kind: str, device: str) -> None:
    held = both(monkeypatch, Run(ordinary, device, kind=kind, cluster={"workers": 2}))
    assert held == [6] * (2 * STEPS)


@pytest.mark.parametrize("device", DEVICES)
def test_a_hook_that_clips_just_before_the_push_is_heeded(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    assert both(monkeypatch, Run(ordinary, device, hooks=(_Clipping(),))) == [6, 0] * (STEPS // 2)


@pytest.mark.parametrize("device", DEVICES)
def test_whoever_makes_the_updates_itself_sends_no_gradients(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    assert both(monkeypatch, Run(ordinary, device, kind="SGD")) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"maximize": True}, {"momentum": 0.9}, {"foreach": True}])
def test_under_async_too_sgd_with_an_option_that_only_the_ps_can_apply_sends_its_gradients_early(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], device: str
) -> None:
    run = Run(ordinary, device, kind="SGD", options=options, rule=tq.Async())
    assert both(monkeypatch, run) == [6] * STEPS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pipeline", [False, True])
def test_hooks_are_set_on_a_gpu_unless_the_run_is_pipelined(
    monkeypatch: pytest.MonkeyPatch, pipeline: bool, device: str
) -> None:
    """Pipelined, the ps may still read the last gradient while the next is computed."""
    monkeypatch.setattr(early, "LEAST_BYTES", 0)

    def work(task: Task) -> set[int]:
        model = make(device)
        optimizer = tq.Optimizer(torch.optim.AdamW(model.parameters()), rule=tq.Async(pipeline=pipeline))
        found: set[int] = set()
        with tq.Session(task, model, optimizer, last_step=3, patience=PATIENCE) as session:
            while not session.should_stop():
                ordinary(model, optimizer, *batches(1, device)[0], 0)
                found = hooks_on(model)
        assert hooks_on(model) == {0}
        return found

    assert Cluster().run(work)[0] == {int(device == "cuda" and not pipeline)}
