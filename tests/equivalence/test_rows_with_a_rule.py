"""Tables with an optimizer and a rule of their own, beside a dense part with another."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import ConfigError
from torchquorum.formats.ledger import Entry, read_records
from torchquorum.session.join import Task

STEPS = 8
ONE_AT_A_TIME = threading.Lock()


class Clicks(nn.Module):
    """A sparse embedding and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.EmbeddingBag(97, 5, mode="mean", sparse=True)
        self.top = nn.Linear(5, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.words(ids))


class Users(nn.Module):
    """Two growing tables, of which one forgets, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users = tq.Table(4, admit=2, ttl=4)
        self.words = tq.Table(3, optimizer=tq.rows.LazyAdam(lr=0.05), mode="sum")
        self.top = nn.Linear(7, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.users(ids[:, 0] * 7919), self.words(ids)], 1))


def loss_of(model: nn.Module, worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    ids = torch.randint(0, 97, (12, 4), generator=generator)
    return (model(ids) - torch.randn(12, 1, generator=generator)).square().mean()


def two(model: Any, rows: type[torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    tables = [p for name, p in model.named_parameters() if not name.startswith("top")]
    return torch.optim.Adam(model.top.parameters(), lr=0.02), rows(tables, lr=0.1)  # pyright: ignore[reportCallIssue]


def train(
    model_of: type[nn.Module],
    rows: type[torch.optim.Optimizer],
    *,
    ps: int = 1,
    workers: int = 1,
    steps: int = STEPS,
    rule: Any = None,
    **options: Any,
) -> list[torch.Tensor]:
    def work(task: Task) -> list[torch.Tensor]:
        with ONE_AT_A_TIME:
            model = model_of()
        dense, sparse = two(model, rows)
        opt, own = tq.Optimizer(dense, rule=tq.Sync()), tq.Optimizer(sparse, rule=rule or tq.Async())
        arguments = {"last_step": steps, "patience": PATIENCE, "wait_for_workers": workers, **options}
        with tq.Session(task, model, {"dense": opt, "rows": own}, **arguments) as session:
            while not session.should_stop():
                step = session.global_step
                opt.zero_grad()
                own.zero_grad()
                loss_of(model, task.index, step).backward()
                own.step()
                opt.step()
            found = [rows_of(model, table) for table in ("users", "words")] if model_of is Users else []
        return [*found, *(p.detach() for p in model.parameters() if p.numel())]

    return Cluster(ps=ps, workers=workers).run(*[work] * workers)[0]


def rows_of(model: Any, table: str) -> torch.Tensor:
    keys = torch.arange(97) * (7919 if table == "users" else 1)
    with torch.no_grad():
        return getattr(model, table)(keys if table == "users" else keys[:, None]).clone()


@pytest.mark.parametrize("rows", [torch.optim.SparseAdam, torch.optim.Adagrad])
@pytest.mark.parametrize("ps", [1, 2])
def test_one_worker_has_the_bits_of_two_optimizers_in_plain_pytorch(ps: int, rows: type[torch.optim.Optimizer]) -> None:
    model = Clicks()
    dense, sparse = two(model, rows)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, 0, step).backward()
        sparse.step()
        dense.step()
    for mine, other in zip(train(Clicks, rows, ps=ps), [p.detach() for p in model.parameters()], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("rule", [tq.Async(), tq.Bounded(2), tq.Sync()])
def test_tables_go_by_their_own_rule_beside_a_dense_part_in_sync(tmp_path: Path, rule: tq.Rule) -> None:
    train(Users, torch.optim.SGD, workers=2, rule=rule, logdir=str(tmp_path))
    records = [r for r in read_records(tmp_path) if isinstance(r, Entry) and r.accepted]
    made = {name: max(r.met + 1 for r in records if r.optimizer == name) for name in ("dense", "rows")}
    assert made["dense"] == STEPS
    assert made["rows"] >= (STEPS if rule.aggregate is None else 2 * STEPS - 2), (made, rule)


@pytest.mark.parametrize("model", [Clicks, Users])
def test_a_run_goes_on_with_the_same_bits_on_another_number_of_ps_tasks(tmp_path: Path, model: Any) -> None:
    rows = torch.optim.SparseAdam if model is Clicks else torch.optim.SGD
    for ps, steps in ((1, 3), (3, 6), (2, STEPS)):
        ours = train(model, rows, ps=ps, steps=steps, logdir=str(tmp_path))
    for mine, other in zip(ours, train(model, rows), strict=True):
        assert torch.equal(mine, other)


def test_a_table_of_two_optimizers_is_an_error() -> None:
    def work(task: Task) -> None:
        model = Users()
        first, second = (tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2))
        with tq.Session(task, model, [first, second], last_step=1, patience=PATIENCE):
            pass

    with pytest.raises(ConfigError, match=r"in opt0 and in opt1"):
        Cluster().run(work)
