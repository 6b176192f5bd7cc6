"""Rows that are asked for one batch ahead: the same bits, unless older rows are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import ConfigError
from torchquorum.session.join import Task

STEPS = 8
ONE_AT_A_TIME = threading.Lock()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.EmbeddingBag(97, 5, mode="mean", sparse=True)
        self.users = tq.Table(4, capacity=60, optimizer=tq.rows.Adagrad(lr=0.1), mode="sum")
        self.top = nn.Linear(9, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.words(ids), self.users(ids * 7919)], 1))


def data(rows: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 97, (rows, 4), generator=generator), torch.randn(rows, 1, generator=generator)


def wanted(ids: torch.Tensor, _target: Any = None) -> dict[str, torch.Tensor]:
    return {"words": ids, "users": ids * 7919}


def by_hand(session: tq.Session) -> Iterator[Any]:
    batches = list(DataLoader(TensorDataset(*data()), batch_size=12))
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        if following is not None:
            session.prefetch({model_of(session).words: following[0], "users": following[0] * 7919})
        yield batch


def model_of(session: tq.Session) -> Any:
    return session.model


def train(way: str, *, ps: int = 1, workers: int = 1, **options: Any) -> list[torch.Tensor]:
    def work(task: Task) -> list[torch.Tensor]:
        with ONE_AT_A_TIME:
            model = Model()
        ahead = tq.Batches(data(), 12, seed=5, prefetch=wanted if way == "batches" else None)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=tq.Sync())
        loader = DataLoader(TensorDataset(*data()), batch_size=12)
        with tq.Session(
            task, model, optimizer, last_step=STEPS, patience=PATIENCE, data=ahead, wait_for_workers=workers, **options
        ) as session:
            batches = {
                "none": lambda: loader,
                "loader": lambda: session.prefetched(loader, lambda batch: wanted(*batch)),
                "hand": lambda: by_hand(session),
                "batches": lambda: ahead,
                "plain batches": lambda: ahead,
            }[way]()
            for ids, target in batches:
                optimizer.zero_grad()
                (model(ids) - target).square().mean().backward()
                optimizer.step()
                if session.should_stop():
                    break
            rows = model.users(torch.arange(97)[:, None] * 7919).detach().clone()
        return [rows, *(p.detach() for p in model.parameters() if p.numel())]

    return Cluster(ps=ps, workers=workers).run(*[work] * workers)[0]


@pytest.mark.parametrize(("way", "ps"), [("loader", 1), ("hand", 2), ("batches", 2)])
def test_rows_that_have_changed_since_are_fetched_again_so_bits_stay(way: str, ps: int) -> None:
    plainly = train("plain batches" if way == "batches" else "none", ps=ps)
    for mine, other in zip(train(way, ps=ps), plainly, strict=True):
        assert torch.equal(mine, other)


def test_two_workers_in_sync_have_the_same_bits_too() -> None:
    for mine, other in zip(train("hand", ps=2, workers=2), train("none", ps=2, workers=2), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["none", "hand"])
def test_older_and_kept_rows_are_used_where_they_are_asked_for_and_it_is_said(way: str, capsys: Any) -> None:
    plainly, ours = train("none"), train(way, rows=tq.rows.Reading(max_staleness=3, keep=50))
    assert "rows may be read up to 3 updates old, and 50 rows of each table are kept" in capsys.readouterr().err
    assert not all(torch.equal(mine, other) for mine, other in zip(ours, plainly, strict=True))
    assert all(torch.allclose(mine, other, atol=0.5) for mine, other in zip(ours[1:], plainly[1:], strict=True))


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.zeros(2, dtype=torch.int64), "has 2 tables of rows"),
        ({"top": torch.zeros(2, dtype=torch.int64)}, "has no rows on the ps tasks"),
        ({"users": torch.zeros(2)}, "ids of users are int64"),
        ({"users": [1, 2]}, "not a tensor"),
        ([1, 2], "give a tensor of ids, or a mapping"),
    ],
)
def test_ids_that_reach_no_table_are_an_error(ids: Any, said: str) -> None:
    def work(task: Task) -> None:
        model = Model()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, last_step=1, patience=PATIENCE) as session:
            session.prefetch(ids)

    with pytest.raises(ConfigError, match=said):
        Cluster().run(work)


def test_what_has_no_effect_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no effect with max_staleness=0"):
        tq.rows.Reading(keep=5)
    with pytest.raises(ConfigError, match="tq.Session\\(..., data=batches\\)"):
        next(tq.Batches(data(), 12, prefetch=wanted))
