from pathlib import Path
from typing import Any

import torch

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from tests.unit.session.runs import Line
from torchquorum.session.join import Task


def run(folder: Path | None, last_step: int) -> list[list[int]]:
    """Trains up to a global step on prefetched batches; returns the rows of every batch that the loop got."""
    seen: list[list[int]] = []
    rows = torch.arange(40)

    def work(task: Task) -> None:
        model = Line()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule=tq.Sync())
        options: Any = {"last_step": last_step, "patience": PATIENCE, "logdir": folder}
        with (
            tq.data.Prefetcher(tq.Batches((rows, rows), 4), depth=5) as batches,
            tq.Session(task, model, optimizer, data=batches, **options) as session,
        ):
            while not session.should_stop():
                x, _ = next(batches)
                seen.append(x.tolist())
                optimizer.zero_grad()
                model(torch.ones(4, 3)).square().mean().backward()
                optimizer.step()

    Cluster().run(work)
    return seen


def test_a_resumed_run_goes_on_with_the_batch_that_comes_next(tmp_path: Path) -> None:
    whole = run(None, 31)
    assert run(tmp_path, 13) + run(tmp_path, 31) == whole


def test_the_end_of_the_data_ends_an_ordinary_loop() -> None:
    steps: list[int] = []

    def work(task: Task) -> None:
        model = Line()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule=tq.Sync())
        with (
            tq.data.Prefetcher(torch.ones(7, 4, 3), epochs=2) as batches,
            tq.Session(task, model, optimizer, patience=PATIENCE) as session,
        ):
            for x in batches:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            steps.append(session.global_step)

    Cluster().run(work)
    assert steps == [14]
