"""`tq.Local(h, fragments=...)` against the same algorithm in a plain loop, and resumed; several `tq.Local` at once."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_local_steps import ONE, OUTERS, ours, resumable
from tests.equivalence.test_one_worker import OPTIMIZERS, Net, backward, same
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import ConfigError
from torchquorum.session.join import Task
from torchquorum.worker.fragments import cut

Make = Callable[[nn.Module], torch.optim.Optimizer]


def streaming(
    make_inner: Make, outer: Any, *, h: int, fragments: int, overlap: int, mix: float, workers: int, outer_steps: int
) -> list[torch.Tensor]:
    """Streaming DiLoCo in a plain loop, until the first fragment has been through so many rounds."""
    shared, models = Net(), [Net() for _ in range(workers)]
    inners = [make_inner(model) for model in models]

    def trained(model: nn.Module) -> list[torch.Tensor]:
        return list(model.parameters())

    parts = cut(trained(shared), fragments)
    mine = [cut(trained(model), fragments) for model in models]
    optimizers = [outer(part) for part in parts]
    anchors = [[p.detach().clone() for p in part] for part in parts]
    due = [(k + 1) * h // fragments for k in range(fragments)]
    for n in range(1, (outer_steps - 1) * h + due[0] + overlap + 1):
        for w, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            backward(model, w, n - 1)
            inner.step()
        for k in range(fragments):
            if n >= due[k] and (n - due[k]) % h == 0:
                for i, p in enumerate(parts[k]):
                    changes = [anchors[k][i] - mine[w][k][i].detach() for w in range(workers)]
                    total = changes[0]
                    for change in changes[1:]:
                        total = total + change
                    p.grad = total / workers
                optimizers[k].step()
            if n >= due[k] + overlap and (n - due[k] - overlap) % h == 0:
                anchors[k] = [p.detach().clone() for p in parts[k]]
                for w in range(workers):
                    for p, x in zip(mine[w][k], parts[k], strict=True):
                        p.data.copy_(x.detach().clone().lerp_(p.detach(), mix))
    return [p.detach() for p in shared.parameters()]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("fragments", "overlap", "mix"), [(3, 0, 0.0), (3, 1, 0.5), (2, 2, 0.25), (1, 4, 0.5)])
def test_fragments_equal_a_plain_loop(workers: int, fragments: int, overlap: int, mix: float) -> None:
    how: dict[str, Any] = {"fragments": fragments, "overlap": overlap, "mix": mix}
    found, _ = ours(OPTIMIZERS["adamw"], tq.Local(6, OUTERS["diloco"], **how), workers=workers, outer_steps=4)
    assert same(found, streaming(OPTIMIZERS["adamw"], OUTERS["diloco"], h=6, workers=workers, outer_steps=4, **how))


@pytest.mark.parametrize("options", [{"transport": "tcp"}, {"ps": 2}, {"compress": "int8"}], ids=str)
def test_fragments_are_the_same_on_every_way(options: dict[str, Any]) -> None:
    rule = tq.Local(6, OUTERS["diloco"], fragments=2)
    found, _ = ours(OPTIMIZERS["sgd"], rule, workers=2, outer_steps=3, **options)
    again, _ = ours(OPTIMIZERS["sgd"], rule, workers=2, outer_steps=3, compress=options.get("compress"))
    assert same(found, again)


@pytest.mark.parametrize("rule", [tq.Async(), tq.Bounded(1), tq.Sync(1), tq.Buffered(2)], ids=str)
def test_every_preset_decides_on_fragments(rule: tq.Rule) -> None:
    _, steps = ours(OPTIMIZERS["sgd"], tq.Local(4, ONE, fragments=2, rule=rule), workers=2, outer_steps=4)
    assert steps[-1].stop


@pytest.mark.parametrize("compress", [None, "int4"])
def test_a_stopped_run_of_fragments_goes_on_with_the_same_bits(compress: str | None, tmp_path: Path) -> None:
    rule = tq.Local(6, OUTERS["diloco"], fragments=3)
    whole, inner_steps, _ = resumable(tmp_path / "whole", 5, rule=rule, compress=compress)
    resumable(tmp_path / "parts", 2, rule=rule, compress=compress)
    parts, inner_again, _ = resumable(tmp_path / "parts", 5, rule=rule, compress=compress)
    assert same(whole, parts)
    assert inner_steps == inner_again


def test_what_cannot_be_cut_is_said() -> None:
    model = nn.Linear(2, 2)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=tq.Local(9, fragments=3))
    with pytest.raises(ConfigError, match="fragments=3: the optimizer has 2 parameters"):
        optimizer.split()
    wrongs: list[dict[str, Any]] = [
        {"overlap": 5, "fragments": 2},
        {"fragments": 11},
        {"mix": 0.5},
        {"fragments": 2, "mix": 1.0},
    ]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=next(iter(wrong)) if len(wrong) == 1 else "overlap|mix"):
            tq.Local(10, **wrong)


def test_fragments_are_of_about_one_size_and_none_is_empty() -> None:
    parameters = [torch.zeros(n) for n in (1, 1, 100, 1, 1)]
    assert [len(part) for part in cut(parameters, 3)] == [2, 1, 2]
    for count in range(1, 6):
        parts = cut(parameters, count)
        assert all(parts)
        assert [p for part in parts for p in part] == parameters


def two_optimizers(folder: Path, last_step: int, h: tuple[int, int]) -> list[list[torch.Tensor]]:
    cluster, all_in, lock = Cluster(workers=2), threading.Barrier(2), threading.Lock()

    def work(task: Task) -> list[torch.Tensor]:
        with lock:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
            data = torch.randn(40, 5)
        batches = tq.Batches((data, data.sum(1)), 4, worker=task.index, workers=2)
        adam = tq.Optimizer(torch.optim.Adam(model[0].parameters(), lr=0.01), rule=tq.Local(h[0], OUTERS["diloco"]))
        sgd = tq.Optimizer(torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9), rule=tq.Local(h[1], ONE))
        with tq.Session(
            task, model, {"adam": adam, "sgd": sgd}, last_step=last_step, logdir=folder, data=batches, patience=PATIENCE
        ) as session:
            all_in.wait(20)
            while not session.should_stop():
                x, _ = next(batches)
                adam.zero_grad()
                sgd.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                adam.step()
                sgd.step()
            session.pull()
        return [p.detach().clone() for p in model.parameters()]

    try:
        return cluster.run(work, work)
    finally:
        cluster.stop()


@pytest.mark.parametrize("h", [(3, 3), (2, 5)])
def test_several_optimizers_of_local_steps_go_on_with_the_same_bits(h: tuple[int, int], tmp_path: Path) -> None:
    whole = two_optimizers(tmp_path / "whole", 6, h)
    two_optimizers(tmp_path / "parts", 3, h)
    parts = two_optimizers(tmp_path / "parts", 6, h)
    assert same(whole[0], whole[1])
    assert same(whole[0], parts[0])
