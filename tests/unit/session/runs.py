"""Small runs for tests of hooks: a model whose loss is known, on a whole cluster in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.session.hooks.hook import Hook
from torchquorum.session.join import Task


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def train(
    hooks: Callable[[Task], Sequence[Hook]],
    *,
    workers: int = 1,
    last_step: int | None = 20,
    losses: Callable[[int], float | None] = lambda step: 1.0 / step,
    rule: Any = None,
    logdir: Any = None,
    in_loop: Callable[[tq.Session], None] = lambda session: None,
    at_end: Callable[[tq.Session], None] = lambda session: None,
    model: Callable[[], nn.Module] = Line,
    **options: Any,
) -> list[tuple[int, int]]:
    """Trains with hooks; `losses` gives the loss of a local step. Returns each worker's global and local step."""
    cluster = Cluster(workers=workers)
    all_in = threading.Barrier(workers)

    def work(task: Task) -> tuple[int, int]:
        net = model()
        optimizer = tq.Optimizer(torch.optim.SGD(net.parameters(), lr=0.01), rule=rule or tq.Sync(), **options)
        session = tq.Session(
            task, net, optimizer, last_step=last_step, patience=PATIENCE, logdir=logdir, hooks=hooks(task)
        )
        with session:
            all_in.wait(20)
            while not session.should_stop():
                optimizer.zero_grad()
                net(torch.ones(4, 3)).square().mean().backward()
                optimizer.step(loss=losses(session.local_step + 1))
                in_loop(session)
            at_end(session)
        return session.global_step, session.local_step

    return cluster.run(*[work] * workers)
