"""The five walks of docs/ARCHITECTURE.md are made, and the modules that they name are entered in the order in which they name them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.documents.walks import PACKAGE, Recorder, faults_of, rows_of
from tests.harness import PATIENCE, Cluster
from torchquorum.fastpath import participant
from torchquorum.fastpath import steps as fastpath_steps
from torchquorum.memory.lock import supported
from torchquorum.session.join import Task

DEADLINE_S = 60.0
BEFORE = 3  # steps that are made before the walk
WALKS = (
    "1. A sync step on the fast path",
    "2. A sync step over TCP",
    "3. A checkpoint",
    "4. A worker dies, and comes back",
    "5. A ps dies, and comes back",
)
_ONE_AT_A_TIME = threading.Lock()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, nobody gives the fast path up because others are late."""
    monkeypatch.setattr(participant, "WAIT_S", DEADLINE_S)
    monkeypatch.setattr(fastpath_steps, "PS_SILENT_S", DEADLINE_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Trainer:
    """A worker's model and optimizer; its variables are large enough for frames that get a thread."""

    def __init__(self, **options: Any) -> None:
        with _ONE_AT_A_TIME:
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Linear(200, 150), nn.BatchNorm1d(150))
        self.optimizer = tq.Optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1), rule=tq.Sync())
        self.options = {"patience": PATIENCE, **options}

    def session(self, task: Task) -> tq.Session:
        return tq.Session(task, self.model, self.optimizer, **self.options)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 200)).square().mean().backward()
        self.optimizer.step()

    def go_on(self, session: tq.Session) -> None:
        while not session.should_stop():
            self.step()


def walk(
    cluster: Cluster, ready: Callable[[], bool], over: Callable[[], bool], recorder: Recorder, **options: Any
) -> None:
    """Two workers make some steps, and then one that is recorded, from `ready` until `over`."""
    together = threading.Barrier(2)

    def work(task: Task) -> None:
        trainer = Trainer(last_step=BEFORE + 3, **options)
        with trainer.session(task) as session:
            together.wait(DEADLINE_S)
            for _ in range(BEFORE):
                trainer.step()
            until(ready)
            together.wait(DEADLINE_S)
            recorder.on = True
            trainer.step()
            until(over)
            together.wait(DEADLINE_S)
            recorder.on = False
            trainer.go_on(session)

    cluster.run(work, work)


@pytest.mark.skipif(not supported(), reason="this system has no locks between processes")
def test_a_sync_step_on_the_fast_path() -> None:
    with Recorder().recording() as recorder:
        cluster = Cluster(workers=2)
        walk(
            cluster,
            ready=lambda: cluster.leading().fastpath_is_open,
            over=lambda: cluster.leading().leader.quorum.version > BEFORE,
            recorder=recorder,
        )
    assert not faults_of(rows_of(WALKS[0]), recorder.entered), recorder.entered


def test_a_sync_step_over_tcp(tmp_path: Path) -> None:
    with Recorder().recording() as recorder:
        cluster = Cluster(workers=2, transport="tcp", sockets=True)
        walk(cluster, ready=lambda: True, over=lambda: True, recorder=recorder, logdir=str(tmp_path))
    assert not faults_of(rows_of(WALKS[1]), recorder.entered), recorder.entered


def test_a_checkpoint(tmp_path: Path) -> None:
    with Recorder().recording() as recorder:
        cluster = Cluster(workers=2)
        walk(
            cluster,
            ready=lambda: True,
            over=lambda: cluster.leading().checkpoints.newest.path.endswith(f"-{BEFORE + 1}"),
            recorder=recorder,
            logdir=str(tmp_path),
            save_every_steps=BEFORE + 1,
        )
    assert not faults_of(rows_of(WALKS[2]), recorder.entered), recorder.entered


def test_a_ps_dies_and_comes_back(tmp_path: Path) -> None:
    with Recorder().recording() as recorder:
        cluster = Cluster(ps=2, sockets=True)

        def work(task: Task) -> None:
            trainer = Trainer(logdir=str(tmp_path))
            with trainer.session(task) as session:
                for _ in range(BEFORE):
                    trainer.step()
                session.save(wait_s=DEADLINE_S)
                recorder.on = True
                cluster.restart(1)
                trainer.step()
                recorder.on = False
                session.request_stop()

        cluster.run(work)
    assert not faults_of(rows_of(WALKS[4]), recorder.entered), recorder.entered


@pytest.mark.parametrize("heading", WALKS)
def test_the_modules_of_a_walk_are_there(heading: str) -> None:
    rows = rows_of(heading)
    assert len(rows) > 5
    assert [module for row in rows for module in row if not (Path(PACKAGE) / module).exists()] == []


def test_a_module_that_is_not_passed_or_at_another_place_is_found() -> None:
    rows: Sequence[Sequence[str]] = [["a.py", "b.py"], ["c.py"]]
    assert not faults_of(rows, ["x.py", "a.py", "b.py", "c.py"])
    assert not faults_of(rows, ["a.py", "c.py", "b.py"])  # nested calls
    assert faults_of(rows, ["a.py", "b.py"]) == ["c.py: not entered"]
    assert faults_of(rows, ["c.py", "a.py", "b.py"]) == ["c.py: not entered any more at its place"]
    assert not faults_of(rows, ["a.py", "b.py"], elsewhere=["c.py"])
