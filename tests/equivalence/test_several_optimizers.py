"""Several optimizers in one session: with one worker plain PyTorch, bit for bit; under Sync the joined batch; resumed, the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import ConfigError, TorchQuorumError
from torchquorum.formats.ledger import read_records
from torchquorum.session.join import Task

STEPS = 8


SEEDED = threading.Lock()  # workers are threads here, which share torch's generator


def nets() -> tuple[nn.Module, nn.Module]:
    with SEEDED:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2)), nn.Sequential(
            nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 1)
        )


def optimizers(g: nn.Module, d: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.SGD(d.parameters(), lr=0.05, momentum=0.9)


def iteration(
    g: nn.Module, d: nn.Module, opt_g: Any, opt_d: Any, batch: tuple[torch.Tensor, torch.Tensor], critics: int
) -> None:
    """One iteration of a GAN: the discriminator `critics` times, then the generator."""
    real, noise = batch
    loss = nn.functional.binary_cross_entropy_with_logits
    for _ in range(critics):
        opt_d.zero_grad()
        (loss(d(real), torch.ones(len(real), 1)) + loss(d(g(noise).detach()), torch.zeros(len(real), 1))).backward()
        opt_d.step()
    opt_g.zero_grad()
    loss(d(g(noise)), torch.ones(len(real), 1)).backward()
    opt_g.step()


def batch(step: int, worker: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    real, noise = torch.randn(8, 2, generator=generator), torch.randn(8, 3, generator=generator)
    return (real, noise) if worker is None else (real[4 * worker : 4 * worker + 4], noise[4 * worker : 4 * worker + 4])


def plain(critics: int, steps: int = STEPS) -> list[torch.Tensor]:
    g, d = nets()
    opt_g, opt_d = optimizers(g, d)
    for step in range(steps):
        iteration(g, d, opt_g, opt_d, batch(step), critics)
    return [p.detach() for p in (*g.parameters(), *d.parameters())]


class Steps:
    """A position in the data."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def gan(
    critics: int, *, first: str = "g", halves: bool = False, **options: Any
) -> Callable[[Task], list[torch.Tensor]]:
    def work(task: Task) -> list[torch.Tensor]:
        g, d = nets()
        plain_g, plain_d = optimizers(g, d)
        opt_g, opt_d = tq.Optimizer(plain_g), tq.Optimizer(plain_d)
        data = Steps()
        given = {"g": opt_g, "d": opt_d} if first == "g" else {"d": opt_d, "g": opt_g}
        last = options.pop("last_step", STEPS) * (1 if first == "g" else critics)
        with tq.Session(
            task, {"G": g, "D": d}, given, last_step=last, data=data, patience=PATIENCE, **options
        ) as session:
            while not session.should_stop():
                data.at += 1
                iteration(g, d, opt_g, opt_d, batch(data.at - 1, task.index if halves else None), critics)
        return [p.detach() for p in (*g.parameters(), *d.parameters())]

    return work


@pytest.mark.parametrize(("critics", "first"), [(1, "g"), (1, "d"), (3, "g")])
@pytest.mark.parametrize("num_ps", [1, 2])
def test_one_worker_is_plain_pytorch_whichever_optimizer_is_first(critics: int, first: str, num_ps: int):
    cluster = Cluster(workers=1, ps=num_ps)
    try:
        (found,) = cluster.run(gan(critics, first=first))
        cluster.wait()
    finally:
        cluster.stop()
    assert all(torch.equal(a, b) for a, b in zip(found, plain(critics), strict=True))


def classify(task: Task | None, rows: slice) -> list[torch.Tensor]:
    """Muon for the matrices, AdamW for the rest, each with a schedule; the model is one."""
    with SEEDED:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
        x, y = torch.randn(8, 6), torch.randint(3, (8,))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    muon: Any = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
    adamw: Any = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.01)
    if task is not None:
        muon, adamw = tq.Optimizer(muon, name="muon"), tq.Optimizer(adamw, average=tq.ExponentialMovingAverage(0.9))
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=STEPS) for o in (muon, adamw)]

    def step() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (muon, adamw, *schedulers):
            each.step()

    if task is None:
        for _ in range(STEPS):
            step()
    else:
        workers = task.num_workers
        with tq.Session(
            task, model, [muon, adamw], last_step=STEPS, patience=PATIENCE, wait_for_workers=workers
        ) as session:
            while not session.should_stop():
                step()
            with session.averaged():
                assert any(not torch.equal(p, p.detach().round()) for p in model.parameters())
    return [p.detach().clone() for p in model.parameters()]


def test_muon_beside_adamw_with_schedulers_and_clipping_over_one_model():
    whole = classify(None, slice(None))
    for num_ps in (1, 2):
        cluster = Cluster(workers=1, ps=num_ps)
        (found,) = cluster.run(lambda task: classify(task, slice(None)))
        cluster.wait()
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_two_workers_under_sync_equal_the_joined_batch(tmp_path: Path):
    cluster = Cluster(workers=2)
    try:
        one, two = cluster.run(*[gan(2, halves=True, wait_for_workers=2, logdir=tmp_path)] * 2)
        cluster.wait()
    finally:
        cluster.stop()
    for a, b, c in zip(one, two, plain(2), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)
    entries = [e for e in read_records(tmp_path) if hasattr(e, "local_step")]
    assert {e.optimizer for e in entries} == {"g", "d"} and all(e.accepted for e in entries)  # type: ignore[union-attr]


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path):
    for last in (3, STEPS):
        cluster = Cluster(workers=1)
        try:
            (found,) = cluster.run(gan(2, last_step=last, logdir=tmp_path))
            cluster.wait()
        finally:
            cluster.stop()
    assert all(torch.equal(a, b) for a, b in zip(found, plain(2), strict=True))


def test_workers_that_wait_in_rounds_of_different_optimizers_get_an_error_that_names_both():
    def work(task: Task) -> str:
        g, d = nets()
        opt_g, opt_d = (tq.Optimizer(o) for o in optimizers(g, d))
        try:
            with tq.Session(task, [g, d], {"gen": opt_g, "disc": opt_d}, patience=PATIENCE, wait_for_workers=2):
                for p in (*g.parameters(), *d.parameters()):
                    p.grad = torch.ones_like(p)
                (opt_g if task.index == 0 else opt_d).step()
        except TorchQuorumError as error:
            return str(error)
        return ""

    cluster = Cluster(workers=2)
    try:
        told = cluster.run(work, work)
    finally:
        cluster.stop()
    for text in told:
        assert "round of gen" in text and "round of disc" in text and "same order" in text


def test_a_pull_and_a_state_are_each_optimizers_own():
    def work(task: Task) -> None:
        g, d = nets()
        opt_g, opt_d = (
            tq.Optimizer(o, rule) for o, rule in zip(optimizers(g, d), (tq.Sync(), tq.Async()), strict=True)
        )
        with tq.Session(task, [g, d], [opt_g, opt_d], patience=PATIENCE) as session:
            iteration(g, d, opt_g, opt_d, batch(0), 2)
            assert (session.global_step, opt_g.version, opt_d.version) == (1, 1, 2)
            assert session.pull() == 1
            assert set(opt_g.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
            assert set(opt_d.state_dict()["state"][0]) == {"momentum_buffer"}
            with torch.no_grad():
                next(d.parameters()).fill_(0.5)
            session.assign()
            assert (opt_g.version, opt_d.version) == (1, 3) and bool((next(d.parameters()) == 0.5).all())
            with torch.no_grad():
                next(g.parameters()).fill_(0.5)
            with pytest.raises(ConfigError, match=r"0\.0\.weight: written to"):
                iteration(g, d, opt_g, opt_d, batch(1), 1)

    cluster = Cluster(workers=1)
    try:
        cluster.run(work)
    finally:
        cluster.stop()


def test_what_is_given_is_checked():
    g, d = nets()
    opt_g, opt_d = (tq.Optimizer(o) for o in optimizers(g, d))
    both = tq.Optimizer(torch.optim.SGD([*g.parameters(), *d.parameters()], lr=0.1))
    cluster = Cluster(workers=1)
    try:
        task = cluster.task(0)
        for model, given, text in [
            ([g, d], [opt_g, both], "is in opt0 and in opt1"),
            (g, [opt_g, opt_d], "opt1 has 4 parameters that no model"),
            ([g, d], [opt_g, opt_g], "given twice"),
            ([g, d], [], "at least one"),
            ([g, d], [opt_g, torch.optim.SGD(d.parameters(), lr=0.1)], "wrap it first"),
            ("model", opt_g, "give a torch.nn.Module"),
        ]:
            with pytest.raises(ConfigError, match=text), tq.Session(task, model, given, patience=PATIENCE):  # type: ignore[arg-type]
                pass
    finally:
        cluster.stop()


class Seen(tq.Hook):
    """Notes after which steps it was called."""

    def __init__(self, *, every: bool) -> None:
        self.every_optimizer = every
        self.versions: list[tuple[str, int]] = []

    def after_run(self, session: tq.hooks.HookSession, ran: tq.hooks.Ran) -> None:
        self.versions.append((ran.step.optimizer, ran.step.version))


def test_hooks_follow_the_first_optimizer_unless_they_ask_for_all() -> None:
    first, every = Seen(every=False), Seen(every=True)

    def work(task: Task) -> int:
        g, d = nets()
        opt_g, opt_d = (tq.Optimizer(o, rule=tq.Async()) for o in optimizers(g, d))
        # The critic is six steps ahead after the first iteration: its version is not the global step.
        hooks = [first, every, tq.StopAtStepHook(last_step=3)]
        with tq.Session(task, [g, d], {"g": opt_g, "d": opt_d}, patience=PATIENCE, hooks=hooks) as session:
            step = 0
            while not session.should_stop():
                iteration(g, d, opt_g, opt_d, batch(step), critics=6)
                step += 1
        return step

    assert Cluster().run(work) == [3]
    assert first.versions == [("g", version) for version in (1, 2, 3)]
    assert len(every.versions) == 21


@pytest.mark.parametrize(("num_ps", "critics", "first"), [(1, 2, "g"), (2, 3, "d")])
def test_a_durable_run_loses_no_update_of_any_of_them_when_a_ps_is_lost(
    tmp_path: Path, num_ps: int, critics: int, first: str
) -> None:
    cluster = Cluster(workers=2, ps=num_ps)
    beats = [threading.Event(), threading.Event()]

    def lose() -> None:
        for number, beat in enumerate(beats):
            assert beat.wait(30)
            cluster.restart(number % num_ps)

    def work(task: Task) -> list[torch.Tensor]:
        g, d = nets()
        opt_g, opt_d = (tq.Optimizer(o) for o in optimizers(g, d))
        given = {"g": opt_g, "d": opt_d} if first == "g" else {"d": opt_d, "g": opt_g}
        steps = 40 if first == "g" else 40 * critics
        with tq.Session(
            task, {"G": g, "D": d}, given, last_step=steps, wait_for_workers=2, patience=PATIENCE, logdir=tmp_path,
            durable=True,
        ) as session:  # fmt: skip
            step = 0
            while not session.should_stop():
                iteration(g, d, opt_g, opt_d, batch(step, task.index), critics)
                step += 1
                if task.index == 0 and step in (7, 23):
                    beats[step > 7].set()
            assert step == 40 and (opt_g.version, opt_d.version) == (40, 40 * critics)
        return [p.detach() for p in (*g.parameters(), *d.parameters())]

    loser = threading.Thread(target=lose)
    loser.start()
    try:
        one, two = cluster.run(work, work)
        loser.join()
        cluster.wait()
    finally:
        cluster.stop()
    assert any("are back from the journal" in line for line in cluster.said), cluster.said
    for a, b, c in zip(one, two, plain(critics, 40), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("contiguous", [True, False])
def test_large_variables_of_several_optimizers_come_over_a_socket(contiguous: bool):
    def layers() -> nn.Sequential:
        with SEEDED:
            torch.manual_seed(0)
            linear = [nn.Linear(240, 240) for _ in range(5)]
        for layer in linear if not contiguous else ():
            layer.weight = nn.Parameter(
                layer.weight.detach().t().contiguous().t()
            )  # its memory is in an order of its own
        return nn.Sequential(*linear)

    def steps(model: nn.Sequential, optimizers: list[Any]) -> list[torch.Tensor]:
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.full((2, 240), 0.1 * step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def work(task: Task) -> list[torch.Tensor]:
        model = layers()
        own = [tq.Optimizer(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in model]
        with tq.Session(task, model, own, last_step=3, patience=PATIENCE) as session:
            steps(model, own)
            session.pull()
        return [p.detach().clone() for p in model.parameters()]

    cluster = Cluster(workers=1, transport="tcp", sockets=True)
    try:
        (found,) = cluster.run(work)
    finally:
        cluster.stop()
    model = layers()
    expected = steps(model, [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model])
    assert [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)] == [0.0] * len(expected)
