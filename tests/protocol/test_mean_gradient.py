"""The mean gradient that the ps tasks hand out: that of an update, not that of a worker."""

from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.cluster import TaskId
from torchquorum.session.hooks.summary_asks import Asks, OverConnection
from torchquorum.session.join import Task


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(6))
        self.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.never = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(("ps", "slice_bytes"), [(1, None), (2, None), (3, 8)])
def test_it_is_the_mean_of_the_round(ps: int, slice_bytes: int | None) -> None:
    found: dict[Any, Any] = {}

    def work(task: Task) -> None:
        model = Three()
        optimizer = tq.Optimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Sync(), placement="greedy", slice_bytes=slice_bytes
        )
        with tq.Session(task, model, optimizer, last_step=4, wait_for_workers=2, patience=PATIENCE) as session:
            spec = task.cluster
            asks = Asks(OverConnection(lambda k: task.connect(spec.address(TaskId("ps", k)), b"asks")), ps)
            while not session.should_stop():
                model.a.grad = torch.arange(6.0) * (1.0 if task.index == 0 else 3.0)
                model.b.grad = torch.full((3,), float(task.index), dtype=torch.float64)
                optimizer.step()
                if task.index == 0:
                    version, mean = asks.mean_gradient(0.0)
                    found[version] = mean
            if task.index == 0:
                found["again"] = asks.mean_gradient(0.0)
            asks.close()

    Cluster(ps=ps, workers=2).run(work, work)
    assert set(found) >= {1, 2, "again"}
    for version in (1, 2):
        assert set(found[version]) == {"a", "b"}
        assert found[version]["a"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        assert found[version]["b"].tolist() == [0.5, 0.5, 0.5]
    assert found["again"] == (-1, {})
