"""A ps dies again just after the chief has made its variables anew: the chief does not wait for itself, but makes them once more."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import LostVariablesError
from torchquorum.session.join import Task
from torchquorum.wire import codec
from torchquorum.wire.channel import Channel

DEADLINE_S = 60.0


class DiesBeforeJoin:
    """The chief's channel to a ps that is killed, and started again, before the chief's join reaches it."""

    def __init__(self, channel: Any, restart: Any) -> None:
        self._channel, self._restart = channel, restart

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def settled(self) -> "DiesBeforeJoin":
        return self

    def send(self, frames: Any) -> None:
        if isinstance(codec.split(frames)[0], m.Join):
            self._restart()
        self._channel.send(frames)


def dying(cluster: Cluster, at: threading.Event, index: int) -> list[int]:
    """From `at` on, ps `index` dies once between its creation and the chief's join; returns where that is noted."""
    died: list[int] = []
    connect = cluster.connect

    def restart_once() -> None:
        if not died:
            died.append(index)
            cluster.restart(index)

    def connect_to_the_dying(address: str, identity: bytes) -> Channel:
        channel: Any = connect(address, identity)
        dies = at.is_set() and identity.startswith(b"worker/0") and address.endswith(f":{1000 + index}")
        if dies:
            channel = DiesBeforeJoin(channel, restart_once)
        return channel

    cluster.connect = connect_to_the_dying  # type: ignore[method-assign]
    return died


def parts() -> tuple[nn.ParameterList, tq.Optimizer]:
    model = nn.ParameterList([nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))])
    return model, tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Async())


def trainer(folder: Path, after_step: Callable[[tq.Session], object] | None = None) -> Callable[[Task], int]:
    """A worker that makes a step, and another after what happens then; returns where the variables agree to be."""

    def work(task: Task) -> int:
        model, optimizer = parts()
        with tq.Session(task, model, optimizer, patience=PATIENCE, logdir=str(folder)) as session:
            for parameter in model.parameters():
                parameter.grad = -torch.ones_like(parameter)
            optimizer.step()
            if after_step is not None:
                after_step(session)
                optimizer.step()
            assert float(model[0].detach().min()) == float(model[1].detach().max()) == session.global_step
            return session.global_step

    return work


@pytest.mark.parametrize("index", [0, 1])
def test_a_ps_that_dies_between_its_creation_and_the_join_is_created_again(index: int, tmp_path: Path) -> None:
    cluster = Cluster(ps=2)
    recovers = threading.Event()
    died = dying(cluster, recovers, index)

    def lose_ps_1(session: tq.Session) -> None:
        session.save(wait_s=DEADLINE_S)
        recovers.set()
        cluster.restart(1)

    assert cluster.run(trainer(tmp_path, lose_ps_1)) == [2]
    assert died == [index]


@pytest.mark.parametrize("index", [0, 1])
def test_also_when_a_run_begins_where_there_is_something_to_go_on_from(index: int, tmp_path: Path) -> None:
    assert Cluster(ps=2).run(trainer(tmp_path)) == [1]
    cluster = Cluster(ps=2)
    now = threading.Event()
    now.set()
    died = dying(cluster, now, index)
    assert cluster.run(trainer(tmp_path)) == [2]
    assert died == [index]


@pytest.mark.parametrize("index", [0, 1])
def test_where_there_is_nothing_to_go_on_from_it_is_an_error_that_names_the_ps(index: int) -> None:
    cluster = Cluster(ps=2)
    now = threading.Event()
    now.set()
    dying(cluster, now, index)

    def work(task: Task) -> None:
        model, optimizer = parts()
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            pass

    with pytest.raises(LostVariablesError, match=rf"/job:ps/task:{index} was restarted and its variables are lost"):
        cluster.run(work)
