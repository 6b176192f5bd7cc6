"""Gradients with NaN or infinity: refused with a reason, said, counted, and never a hang."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import NonfiniteError
from torchquorum.formats.ledger import read_ledger
from torchquorum.session.join import Task

BAD = (float("nan"), float("inf"), -float("inf"))


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(3, dtype=dtype))


def run(
    gradients: dict[int, float],
    *,
    ps: int = 1,
    rule: tq.Rule | None = None,
    dtype: torch.dtype = torch.float32,
    logdir: Path | None = None,
    said: list[str] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, list[tq.types.Step]]:
    """One worker, ten updates; `gradients` has the value of b's gradient at some local steps, else 1."""

    def work(task: Task) -> tuple[torch.Tensor, list[tq.types.Step]]:
        model, steps = Two(dtype), []
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=rule or tq.Sync(), **options)
        with tq.Session(task, model, optimizer, last_step=10, patience=PATIENCE, logdir=logdir) as session:
            while not session.should_stop():
                model.a.grad = torch.ones(5, dtype=dtype)
                model.b.grad = torch.ones(3, dtype=dtype)
                model.b.grad[1] = gradients.get(session.local_step + 1, 1.0)
                optimizer.step()
                steps.append(optimizer.last)
        return torch.cat([model.a, model.b]).detach(), steps

    cluster = Cluster(ps=ps)
    (found,) = cluster.run(work)
    if said is not None:
        said += cluster.said
    return found


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async(), tq.Bounded(2)], ids=str)
def test_one_that_is_not_finite_is_refused_and_the_run_goes_on(bad: float, ps: int, rule: tq.Rule) -> None:
    values, steps = run({3: bad, 4: bad}, ps=ps, rule=rule)
    assert values.tolist() == [-10.0] * 8
    assert [s.reason for s in steps if not s.accepted] == ["not finite"] * 2 and len(steps) == 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_any_dtype(dtype: torch.dtype) -> None:
    values, steps = run({1: BAD[0]}, dtype=dtype)
    assert values.tolist() == [-10.0] * 8 and len(steps) == 11


def test_finite_values_whose_sum_is_not_are_welcome() -> None:
    large = torch.finfo(torch.float32).max
    values, steps = run({k: (large if k % 2 else -large) for k in range(1, 11)})
    assert all(s.accepted for s in steps) and bool(torch.isfinite(values).all())


def test_the_ledger_has_the_reason(tmp_path: Path) -> None:
    run({5: BAD[1]}, logdir=tmp_path)
    refused = [e for e in read_ledger(tmp_path) if not e.accepted]
    assert [(e.local_step, e.reason) for e in refused] == [(5, "not finite")]


@pytest.mark.parametrize("ps", [1, 2])
def test_one_that_is_finite_and_far_too_large_names_its_worker_when_the_next_is_not_finite(
    ps: int, tmp_path: Path
) -> None:
    said: list[str] = []
    run({4: 3e38, 6: BAD[1]}, ps=ps, logdir=tmp_path, said=said)
    assert sum("/job:worker/task:0, local step 4, at global step 3 has the norm 3e+38" in line for line in said) == 1
    norms = [e.norm for e in read_ledger(tmp_path)]
    assert norms[3:7] == [3e38, 2.82843, None, 2.82843] and len(norms) == 11


def test_it_is_applied_if_asked_for() -> None:
    values, steps = run({5: BAD[0]}, allow_nonfinite=True)
    assert len(steps) == 10 and bool(values.isnan()[6]) and values[:5].tolist() == [-10.0] * 5


def test_a_worker_that_has_nothing_else_gives_up_and_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NonfiniteError, match=r"100 gradients in a row .* in b, at global step 2"):
        run(dict.fromkeys(range(3, 10_000), BAD[0]))
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("the gradient of local step 3 was refused: not finite in b") == 1


def test_in_a_sync_round_the_others_wait_only_for_a_better_one() -> None:
    def work(task: Task) -> tuple[float, int]:
        model = Two(torch.float32)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Sync())
        with tq.Session(task, model, optimizer, last_step=6, wait_for_workers=2, patience=PATIENCE) as session:
            while not session.should_stop():
                spoilt = task.index == 1 and session.local_step % 2 == 0
                model.a.grad = torch.full((5,), float("nan") if spoilt else 1.0)
                model.b.grad = torch.ones(3)
                optimizer.step()
        return model.a[0].item(), session.local_step

    (value, steps), (other, more) = Cluster(workers=2).run(work, work)
    assert value == other == -6.0 and steps == 6 and more == 12
