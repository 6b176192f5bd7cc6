"""Shard 0 dies after it has answered a push and before another shard has heard of it: nobody may wait for that shard for ever."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import TorchQuorumError
from torchquorum.session.join import Task
from torchquorum.wire import codec

DEADLINE_S = 60.0


class HearsNoLog:
    """The channel of shard 1 to shard 0, on which the log is lost from some moment on."""

    def __init__(self, channel: Any, lost: threading.Event) -> None:
        self._channel, self._lost = channel, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def receive(self, timeout_s: float) -> Any:
        received = self._channel.receive(timeout_s)
        if received is not None and self._lost.is_set() and isinstance(codec.split(received)[0], m.Log):
            return None
        return received


def replace_shard_0(cluster: Cluster, decided: int) -> None:
    """Once shard 0 has made so many updates, another process takes its place, as when it is killed and started again."""
    deadline = time.monotonic() + DEADLINE_S
    while cluster.servers[0].service.run is None or cluster.leading().leader.quorum.version < decided:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    cluster.restart(0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_waits_for_another_shard_notices_that_shard_0_was_lost(transport: str) -> None:
    lost = threading.Event()

    def wrap(channel: Any, identity: bytes) -> Any:
        return HearsNoLog(channel, lost) if identity == b"ps/1" else channel

    cluster = Cluster(ps=2, transport=transport, wrap=wrap)

    def work(task: Task) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))])
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Async())
        patience = replace(PATIENCE, round_s=20 * DEADLINE_S, start_s=5.0)
        with tq.Session(task, model, optimizer, patience=patience) as session:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            lost.set()
            killing = threading.Thread(target=replace_shard_0, args=(cluster, session.global_step + 1))
            killing.start()
            try:
                optimizer.step()
            finally:
                killing.join(DEADLINE_S)

    with pytest.raises(TorchQuorumError, match="/job:ps/task:0"):
        cluster.run(work)
