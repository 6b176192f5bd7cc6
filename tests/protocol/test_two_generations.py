"""A worker comes back while the variables are made again: it takes no answer of before together with one of after."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.harness import PATIENCE, Cluster
from torchquorum.formats.checkpoint import list_checkpoints
from torchquorum.session.join import Task
from torchquorum.wire import codec
from torchquorum.wire.channel import Channel

DEADLINE_S = 60.0


class Late:
    """A worker's channel to shard 0 on which an answer to its join is heard twice, the second time instead of the next one."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.before: list[Any] | None = None
        self.mixed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def settled(self) -> "Late":
        return self

    def receive(self, timeout_s: float) -> Any:
        received = self._channel.receive(timeout_s)
        if received is None:
            return None
        answer = codec.split(received)[0]
        if isinstance(answer, m.Variables) and not self.mixed.is_set():
            if self.before is None:
                self.before = [bytes(frame) for frame in received]
            elif codec.split(self.before)[0] != answer:
                self.mixed.set()
                return self.before
        return received


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_that_joins_again_in_two_generations_takes_the_new_one_and_goes_back_to_its_position(
    tmp_path: Path,
) -> None:
    cluster = Cluster(ps=2, workers=2, transport="tcp")
    recovers, joined, late = threading.Event(), threading.Event(), []
    connect = cluster.connect

    def connect_of_worker_1(address: str, identity: bytes) -> Channel:
        channel: Any = connect(address, identity)
        if recovers.is_set() and identity.startswith(b"worker/1") and address.endswith(":1000"):
            channel = Late(channel)
            late.append(channel)
            joined.set()
        return channel

    cluster.connect = connect_of_worker_1  # type: ignore[method-assign]
    both = threading.Barrier(2)

    def work(task: Task) -> tuple[int, Any]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))])
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Sync())
        batches = tq.Batches((torch.zeros(100), torch.zeros(100)), 1, worker=task.index, workers=2, seed=1)

        def step() -> None:
            next(batches)
            for parameter in model.parameters():
                parameter.grad = -torch.ones_like(parameter)
            optimizer.step()

        logdir = str(tmp_path)
        with tq.Session(task, model, optimizer, patience=PATIENCE, logdir=logdir, data=batches) as session:
            both.wait(DEADLINE_S)  # one alone would make updates by itself
            for _ in range(2):
                step()
            if task.is_chief:
                session.save()
            for _ in range(3):  # in which shard 0 asks where both stood
                step()
            if task.is_chief:
                wait_for(lambda: list_checkpoints(tmp_path))
            if both.wait(DEADLINE_S) == 0:
                recovers.set()
                cluster.restart(1)
            both.wait(DEADLINE_S)
            if (
                task.is_chief
            ):  # the other one joins again first: shard 0 answers it with the variables that it still has
                assert joined.wait(DEADLINE_S)
                wait_for(lambda: late[0].before)
            step()
            assert float(model[0].detach().min()) == float(model[1].detach().max()) == session.global_step
            return session.global_step, batches.state_dict()["step_in_epoch"]

    assert cluster.run(work, work) == [(2, 2), (2, 2)]
    assert late[0].mixed.is_set()
