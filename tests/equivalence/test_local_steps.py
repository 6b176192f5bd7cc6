"""`tq.Local` against the same algorithm in a plain loop: several workers, outer optimizers, transports, compression."""

import functools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import OPTIMIZERS, Net, backward, plain, same
from tests.harness import PATIENCE, Cluster, train
from torchquorum.compress.compressor import read_compressor
from torchquorum.compress.feedback import Feedback
from torchquorum.session.join import Task
from torchquorum.worker.local_steps import outer_spec

Make = Callable[[nn.Module], torch.optim.Optimizer]
X = torch.randn(600, 37, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (600,), generator=torch.Generator().manual_seed(1))
_LOCK = threading.Lock()
ONE = functools.partial(torch.optim.SGD, lr=1.0)


def diloco(
    make_inner: Make, outer: Any, *, h: int, workers: int, outer_steps: int, compress: str = ""
) -> list[torch.Tensor]:
    """Local steps in a plain loop: every worker from the same values, the mean of the changes, one outer step."""
    shared = Net()
    optimizer = outer([p for p in shared.parameters() if p.requires_grad])
    models = [Net() for _ in range(workers)]
    inners = [make_inner(model) for model in models]
    kept: list[list[Feedback]] = [
        [Feedback(read_compressor(compress), p.numel()) for p in shared.parameters()] if compress else []
        for _ in models
    ]
    for k in range(outer_steps):
        changes = []
        for w, (model, inner) in enumerate(zip(models, inners, strict=True)):
            with torch.no_grad():
                for p, x in zip(model.parameters(), shared.parameters(), strict=True):
                    p.copy_(x)
            for step in range(h):
                inner.zero_grad()
                backward(model, w, k * h + step)
                inner.step()
            change = [(x - p).detach() for p, x in zip(model.parameters(), shared.parameters(), strict=True)]
            for feedback, values in zip(kept[w], change, strict=False):
                feedback.send(values.reshape(-1), values.view(-1))
            changes.append(change)
        for i, x in enumerate(shared.parameters()):
            total = changes[0][i]
            for change in changes[1:]:
                total = total + change[i]
            x.grad = total / workers if x.requires_grad else None
        optimizer.step()
    return [p.detach() for p in shared.parameters()]


def ours(
    make_inner: Make, rule: tq.Rule, *, workers: int, outer_steps: int, **options: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    """The same with torchquorum; every worker's inner steps are numbered from 0."""
    counts = [0] * workers

    def numbered(model: nn.Module, worker: int, _step: int) -> None:
        backward(model, worker, counts[worker])
        counts[worker] += 1

    return train(Net, make_inner, numbered, steps=outer_steps, workers=workers, rule=rule, **options)


OUTERS = {
    "diloco": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "sgd": ONE,
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("workers", [1, 2])
def test_local_steps_equal_a_plain_loop(outer: str, workers: int) -> None:
    rule = tq.Local(3, OUTERS[outer])
    found, _ = ours(OPTIMIZERS["adamw"], rule, workers=workers, outer_steps=4)
    assert same(found, diloco(OPTIMIZERS["adamw"], OUTERS[outer], h=3, workers=workers, outer_steps=4))


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "rmsprop", "groups", "adafactor"])
def test_one_worker_whose_changes_are_taken_over_equals_plain_pytorch(name: str) -> None:
    found, _ = ours(OPTIMIZERS[name], tq.Local(4, ONE), workers=1, outer_steps=3)
    # x - (x - y) is y but for the rounding of x - y.
    for a, b in zip(found, plain(OPTIMIZERS[name], steps=12), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_one_local_step_and_plain_sgd_outside_equal_sync() -> None:
    local, _ = ours(OPTIMIZERS["sgd"], tq.Local(1, ONE), workers=2, outer_steps=8)
    sync, _ = train(Net, OPTIMIZERS["sgd"], backward, steps=8, workers=2, rule=tq.Sync())
    for a, b in zip(local, sync, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("compress", ["int8", "int4", "bfloat16", "topk:4/64+2bit"])
@pytest.mark.parametrize(
    "options", [{"transport": "tcp"}, {"transport": "auto"}, {"transport": "tcp", "ps": 2}], ids=str
)
def test_compression_is_the_same_on_every_way(compress: str, options: dict[str, Any]) -> None:
    rule = tq.Local(2, OUTERS["diloco"])
    found, _ = ours(OPTIMIZERS["adam"], rule, workers=2, outer_steps=4, compress=compress, **options)
    again, _ = ours(
        OPTIMIZERS["adam"], rule, workers=2, outer_steps=4, compress=compress, transport="tcp", ps=options.get("ps", 1)
    )
    assert same(found, again)
    exact = diloco(OPTIMIZERS["adam"], OUTERS["diloco"], h=2, workers=2, outer_steps=4)
    moved = sum(float((a - b).norm()) for a, b in zip(exact, [p.detach() for p in Net().parameters()], strict=True))
    apart = sum(float((a - b).norm()) for a, b in zip(found, exact, strict=True))
    assert 0 < apart < moved


@pytest.mark.parametrize("compress", ["int8", "bfloat16"])
@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async(), tq.Buffered(2)], ids=str)
def test_gradients_of_any_rule_are_compressed(rule: tq.Rule, compress: str) -> None:
    found, _ = train(Net, OPTIMIZERS["sgd"], backward, steps=8, workers=1, rule=rule, compress=compress)
    exact, _ = train(Net, OPTIMIZERS["sgd"], backward, steps=8, workers=1, rule=rule)
    assert not same(found, exact)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "rule", [tq.Local(2, ONE, rule=r) for r in (tq.Async(), tq.Bounded(1), tq.Sync(1), tq.Buffered(2))], ids=str
)
def test_every_preset_decides_on_outer_steps(rule: tq.Rule) -> None:
    _, steps = ours(OPTIMIZERS["sgd"], rule, workers=2, outer_steps=6)
    assert steps[-1].version == 6
    assert [s.reason for s in steps].count("inner") == len(steps) // 2


def resumable(
    folder: Path, last_step: int, *, workers: int = 2, rule: tq.Rule | None = None, **options: Any
) -> tuple[list[torch.Tensor], list[int], list[str]]:
    """Trains to a step in a folder, from where the folder is; returns worker 0's parameters, all inner steps, and what was said."""
    cluster, all_in, lines = Cluster(workers=workers), threading.Barrier(workers), list[str]()

    def work(task: Task) -> Any:
        with _LOCK:
            model = Net()
        batches = tq.Batches((X, Y), 10, worker=task.index, workers=workers)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.97)
        optimizer = tq.Optimizer(inner, rule=rule or tq.Local(3, OUTERS["diloco"]), **options)
        data = {"batches": batches, "scheduler": scheduler}
        with tq.Session(
            task, model, optimizer, last_step=last_step, logdir=folder, data=data, patience=PATIENCE
        ) as session:
            all_in.wait(20)
            while not session.should_stop():
                x, y = next(batches)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x, batches.step_in_epoch % 3 != 1), y).backward()
                optimizer.step()
                scheduler.step()
            inner_step = session.inner_step
            session.pull()
        return [p.detach().clone() for p in model.parameters()], inner_step

    results = cluster.run(*[work] * workers)
    return results[0][0], [inner_step for _, inner_step in results], lines


@pytest.mark.parametrize("compress", [None, "int4", "topk:4/64"])
def test_a_stopped_run_goes_on_with_the_same_bits(compress: str | None, tmp_path: Path) -> None:
    whole, inner_steps, _ = resumable(tmp_path / "whole", 6, compress=compress)
    resumable(tmp_path / "parts", 2, compress=compress)
    parts, inner_again, _ = resumable(tmp_path / "parts", 6, compress=compress)
    assert same(whole, parts)
    assert inner_steps == inner_again == [18, 18]


def test_a_worker_without_its_file_begins_empty_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    resumable(tmp_path, 2)
    shutil.rmtree(tmp_path / "local" / "worker-1")
    _, inner_steps, _ = resumable(tmp_path, 4)
    assert inner_steps == [12, 6]
    assert "/job:worker/task:1: no inner optimizer's state of step 2 or before" in "".join(capfd.readouterr())


def test_a_damaged_file_is_named_and_the_one_before_is_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    resumable(tmp_path, 2)
    resumable(tmp_path, 3)
    damaged = tmp_path / "local" / "worker-0" / "3.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    _, inner_steps, _ = resumable(tmp_path, 4)
    said = "".join(capfd.readouterr())
    assert inner_steps == [9, 12]
    assert f"{damaged} cannot be read" in said
    assert "/job:worker/task:0: goes on at global step 3 with its inner optimizer's state of step 2" in said


def test_momentum_is_applied_once_in_a_round_where_every_change_is_an_update() -> None:
    lone, _ = ours(OPTIMIZERS["sgd"], tq.Local(2, OUTERS["diloco"], rule=tq.Async()), workers=1, outer_steps=4)
    assert same(lone, diloco(OPTIMIZERS["sgd"], OUTERS["diloco"], h=2, workers=1, outer_steps=4))
    spec = outer_spec(tq.Local(2, OUTERS["diloco"], rule=tq.Async()), 1, num_workers=4)
    assert (spec.name, spec.groups[0]["every"]) == ("DelayedNesterov", 4)
    assert outer_spec(tq.Local(2, OUTERS["diloco"], rule=tq.Buffered(2)), 1, num_workers=4).groups[0]["every"] == 2
    assert outer_spec(tq.Local(2, OUTERS["diloco"]), 1, num_workers=4).name == "SGD"
    _, steps = ours(OPTIMIZERS["sgd"], tq.Local(2, OUTERS["diloco"], rule=tq.Async()), workers=2, outer_steps=6)
    assert steps[-1].version == 6


def test_what_came_too_late_is_given_with_the_next_change() -> None:
    """Two workers, an update of one change at the same version: whoever loses the race gives both changes the next time."""
    rule, ended = tq.Local(1, ONE, aggregate=1, max_staleness=0), threading.Barrier(2)
    cluster, all_in = Cluster(workers=2), threading.Barrier(2)

    def work(task: Task) -> Any:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=rule)
        given = 0
        with tq.Session(task, model, optimizer, last_step=24, patience=PATIENCE) as session:
            all_in.wait(20)
            while not session.should_stop():
                optimizer.zero_grad()
                model.weight.grad = torch.full((1, 1), -1.0 if task.index == 0 else -100.0)
                optimizer.step()
                given += optimizer.last.accepted is not None and not optimizer.last.stop
            session.pull()
            link = session.optimizer.link
            residuals = link.residuals_of(0) if link is not None else None
            assert residuals is not None
            kept = float(residuals.by_variable()["weight"].sum())
            ended.wait(20)
        return float(model.weight.detach()), kept, optimizer.last.reason

    (value, kept, _), (same_value, kept_by_other, _) = cluster.run(work, work)
    assert value == same_value
    # All that either has computed is in the variable or kept: a whole number of its ones, or of its hundreds.
    assert (value - kept - kept_by_other) % 1 == 0
    assert kept <= 0 and kept_by_other <= 0 and kept_by_other % 100 == 0
    assert value >= 24
