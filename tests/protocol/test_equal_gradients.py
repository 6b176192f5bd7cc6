"""Two workers that read the same batches under Sync are told so, on every path; those that do not are not."""

from pathlib import Path

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.formats.ledger import read_records
from torchquorum.session.join import Task

SAYS = "gave equal gradients in 4 rounds running: they read the same batches"


def run(*, differs: bool, rule: tq.Rule, ps: int = 1, logdir: Path | None = None, clip: bool = False) -> list[str]:
    """Two workers train on the same batches, or on different ones; returns what the ps tasks said."""

    def work(task: Task) -> None:
        model = nn.Linear(4, 2)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule=rule)
        data = torch.Generator().manual_seed(task.index if differs else 3)
        with tq.Session(
            task, model, optimizer, last_step=20, wait_for_workers=2, patience=PATIENCE, logdir=logdir
        ) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                model(torch.randn(8, 4, generator=data)).square().mean().backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()

    cluster = Cluster(workers=2, ps=ps)
    cluster.run(work, work)
    return cluster.said


@pytest.mark.parametrize("ps", [1, 2])  # one: on the fast path
def test_the_same_batches_are_told_of_once_with_what_to_do(ps: int, tmp_path: Path) -> None:
    (line,) = [line for line in run(differs=False, rule=tq.Sync(), ps=ps, logdir=tmp_path) if SAYS in line]
    assert "/job:worker/task:0, /job:worker/task:1 gave" in line
    assert "tq.data.Sampler(dataset, task)" in line and "session.share" in line
    events = [e for e in read_records(tmp_path) if getattr(e, "event", "") == "equal gradients"]
    assert [e.values for e in events] == [{"workers": [0, 1]}]  # type: ignore[union-attr]


@pytest.mark.parametrize("clip", [False, True])  # clipped gradients have equal norms
def test_different_batches_are_not(clip: bool) -> None:
    assert not [line for line in run(differs=True, rule=tq.Sync(), clip=clip) if SAYS in line]


def test_nor_are_the_same_ones_under_async() -> None:
    assert not [line for line in run(differs=False, rule=tq.Async()) if SAYS in line]
