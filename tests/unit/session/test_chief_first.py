"""A chief whose loop ends before the others', as in programs that count local steps or epochs."""

from pathlib import Path

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.formats.checkpoint import list_checkpoints, load_manifest
from torchquorum.session.join import Task


def run(folder: Path, rule: tq.Rule, local_steps: tuple[int, ...]) -> list[str]:
    """Each worker makes its number of local steps and leaves; returns what the ps said."""
    cluster = Cluster(workers=len(local_steps))

    def work(task: Task) -> None:
        model = nn.Linear(3, 2)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=rule)
        batches = tq.Batches((torch.ones(40, 3), torch.zeros(40)), 2, worker=task.index, workers=task.num_workers)
        options = {"logdir": folder, "data": batches, "wait_for_workers": task.num_workers}
        with tq.Session(task, model, optimizer, patience=PATIENCE, **options) as session:
            while session.local_step < local_steps[task.index]:
                x, _ = next(batches)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    cluster.run(*[work] * len(local_steps))
    return cluster.said


@pytest.mark.parametrize(("rule", "last"), [(tq.Async(), 14), (tq.Sync(), 7)])
def test_what_the_others_do_after_the_chief_is_in_the_last_checkpoint(tmp_path: Path, rule: tq.Rule, last: int) -> None:
    run(tmp_path, rule, (4, 10))
    assert list_checkpoints(tmp_path)[-1].step == last


def test_the_chiefs_last_checkpoint_has_the_position_of_a_worker_that_waits_for_it(tmp_path: Path) -> None:
    run(tmp_path, tq.Sync(), (4, 10))
    first = list_checkpoints(tmp_path)[0]
    assert first.step == 4
    positions = load_manifest(first.path).workers
    assert {worker: body["version"] for worker, body in positions.items()} == {"0": 4, "1": 4}


def test_a_run_that_goes_no_further_is_not_saved_again(tmp_path: Path) -> None:
    run(tmp_path, tq.Async(), (4,))
    saved = [(info.step, info.path.stat().st_ino) for info in list_checkpoints(tmp_path)]
    said = run(tmp_path, tq.Async(), (0,))
    assert [(info.step, info.path.stat().st_ino) for info in list_checkpoints(tmp_path)] == saved
    assert not any("saved" in line for line in said)
