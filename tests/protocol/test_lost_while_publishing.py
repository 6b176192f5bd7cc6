"""A ps is lost while shard 0 publishes a checkpoint: the run goes on from that one, not from the one before."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import DeadlineError
from torchquorum.formats.checkpoint import list_checkpoints
from torchquorum.server.saver import Saver
from torchquorum.session.join import Task

DEADLINE_S = 60.0


class SlowDisk:
    """Holds the saver's thread before it publishes, until it is told to go on."""

    def __init__(self, saver: Saver) -> None:
        self.publishes, self.goes_on = threading.Event(), threading.Event()
        publish = saver.publish

        def slowly(*args: Any) -> None:
            saver.submit(self._wait, answered=False)
            publish(*args)

        saver.publish = slowly  # type: ignore[method-assign]

    def _wait(self) -> None:
        self.publishes.set()
        assert self.goes_on.wait(DEADLINE_S)


@pytest.mark.parametrize("durable", [False, True])
def test_a_checkpoint_that_is_being_published_when_a_ps_is_lost_is_the_one_to_go_on_from(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(ps=2)
    found: list[int] = []

    def work(task: Task) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))])
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Async())
        logdir = str(tmp_path)
        with tq.Session(task, model, optimizer, patience=PATIENCE, logdir=logdir, durable=durable) as session:
            for parameter in model.parameters():
                parameter.grad = -torch.ones_like(parameter)
            optimizer.step()
            session.save(wait_s=DEADLINE_S)
            for _ in range(3):
                optimizer.step()
            checkpoints = cluster.leading().checkpoints
            disk = SlowDisk(cluster.servers[0].service.life.saver)
            session.save()
            assert disk.publishes.wait(DEADLINE_S)
            settle = checkpoints.settle

            def settles() -> bool:  # the disk is done only when the chief has begun to choose
                done = settle()
                disk.goes_on.set()
                return done

            monkeypatch.setattr(checkpoints, "settle", settles)
            cluster.restart(1)
            optimizer.step()  # which finds that the ps is lost, and goes on
            found.append(session.global_step)
            assert float(model[0].detach().min()) == float(model[1].detach().max()) == session.global_step

    cluster.run(work)
    assert found == [5]  # 4 and the gradient that was on its way
    steps = [info.step for info in list_checkpoints(tmp_path)]
    assert 4 in steps and max(steps) == 5


def test_a_disk_that_does_not_come_to_an_end_is_waited_for_with_a_word_and_no_longer_than_the_patience(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(ps=2)

    def work(task: Task) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))])
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Async())
        patience = replace(PATIENCE, start_s=1.5, say_s=0.2)
        with tq.Session(task, model, optimizer, patience=patience, logdir=str(tmp_path)) as session:
            disk = SlowDisk(cluster.servers[0].service.life.saver)
            try:
                for parameter in model.parameters():
                    parameter.grad = -torch.ones_like(parameter)
                optimizer.step()
                session.save()
                assert disk.publishes.wait(DEADLINE_S)
                cluster.restart(1)
                optimizer.step()
            finally:
                disk.goes_on.set()

    with pytest.raises(DeadlineError, match=r"/job:ps/task:0 \(localhost:1000\) to publish a checkpoint and gave up"):
        cluster.run(work)
    assert "/job:worker/task:0: waiting for a checkpoint that is being published: " in capfd.readouterr().err
