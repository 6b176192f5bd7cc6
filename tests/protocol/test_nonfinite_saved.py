"""Checkpoints whose variables hold NaN or infinity: named where they are made, listed, restored and exported; one without is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.cli.checkpoints import checkpoints, export
from torchquorum.formats.checkpoint import list_checkpoints, load_manifest
from torchquorum.server.snapshot import is_finite
from torchquorum.session.join import Task


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5))
        self.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(3))


def train(logdir: Path, last_step: int, gradients: dict[int, float], ps: int = 1, **options: Any) -> list[str]:
    """One worker; `gradients` has the value of b's gradient at some steps. Returns what was said."""

    def work(task: Task) -> None:
        model = Two()
        optimizer = tq.Optimizer(torch.optim.SGD([model.a, model.b], lr=10.0))
        options_of_run = {"logdir": logdir, "save_every_steps": 1, "keep": 2, "patience": PATIENCE, **options}
        with tq.Session(task, model, optimizer, last_step=last_step, **options_of_run) as session:
            while not session.should_stop():
                model.a.grad, model.b.grad = torch.ones(5), torch.ones(3)
                model.b.grad[1] = gradients.get(session.global_step, 1.0)
                optimizer.step()
                session.save(wait_s=60)

    cluster = Cluster(ps=ps)
    cluster.run(work)
    return cluster.said


@pytest.mark.parametrize("ps", [1, 2])
def test_they_are_named_and_the_newest_without_is_kept(
    ps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = train(tmp_path, 8, {3: 3e38}, ps)
    (first, *_) = [line for line in said if "holds NaN or infinity" in line]
    assert "model.ckpt-4 holds NaN or infinity in b. The newest checkpoint before it" in first
    assert any("local step 4, at global step 3 has the norm 3e+38" in line for line in said)
    listed = {info.step: info.nonfinite for info in list_checkpoints(tmp_path)}
    assert listed == {3: [], 7: ["b"], 8: ["b"]}, "a frozen mask of -inf is nothing to tell of"
    shown = CliRunner().invoke(checkpoints, [str(tmp_path)])
    assert shown.output.count("NaN or infinity in b") == 2
    capsys.readouterr()
    again = "\n".join([*train(tmp_path, 9, {}, ps), *capsys.readouterr()])
    assert "the variables of step 8 are not all finite: b hold NaN or infinity" in again
    assert "to go back to model.ckpt-3, move the newer ones out of the folder" in again
    exported = CliRunner().invoke(export, [str(tmp_path), str(tmp_path / "out.safetensors")])
    assert exported.exit_code == 0 and "holds NaN or infinity in b" in exported.output


def test_rows_are_looked_at_too_also_where_only_changes_are_written(tmp_path: Path) -> None:
    def work(task: Task) -> None:
        model = nn.EmbeddingBag(50, 4, sparse=True, mode="sum")
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=10.0), rule=tq.Async())
        with tq.Session(task, model, optimizer, last_step=4, logdir=tmp_path, patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                scale = 3e38 if session.global_step == 1 else 1.0
                (model(torch.tensor([[session.global_step]])) * scale).sum().backward()
                optimizer.step()
                session.save(wait_s=60)

    Cluster().run(work)
    found = {info.step: info.nonfinite for info in list_checkpoints(tmp_path)}
    assert found == {1: [], 2: ["weight"], 3: ["weight"], 4: ["weight"]}
    assert len(load_manifest(tmp_path / "model.ckpt-4").tables[0].files) > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_among_many_is_seen(dtype: torch.dtype, bad: float) -> None:
    values = torch.randn(1000).to(dtype)
    assert is_finite(values) and is_finite(values[:0]) and is_finite(torch.ones(3, dtype=torch.int64))
    values[17] = bad
    assert not is_finite(values)
