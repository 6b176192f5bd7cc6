"""`tq.launch`: functions of this process as the workers of a real cluster of forks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from torchquorum.errors import ConfigError
from torchquorum.launcher.launch import autograd_has_threads

EARLIER = torch.arange(6.0)  # what a notebook's earlier cells have made


@pytest.fixture(autouse=True)
def _may_be_forked() -> None:
    if autograd_has_threads():
        pytest.skip("another test has computed gradients in this process, on a machine with a GPU")


def train(steps: int, *, rule: Any = None, fail: int | None = None, kill: Path | None = None) -> dict[str, Any]:
    task = tq.join()
    if fail == task.index:
        raise RuntimeError("told to fail")
    model = nn.Linear(3, 2)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.001), rule=rule or tq.Sync())
    with tq.Session(task, model, optimizer, last_step=steps) as session:
        while not session.should_stop():
            optimizer.zero_grad()
            model(EARLIER.view(2, 3)).square().mean().backward()
            optimizer.step()
            if kill is not None and task.index == 1 and session.global_step > 3 and not kill.exists():
                kill.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.002 if kill is None else 0.01)
    print(f"worker {task.index} is done", flush=True)
    return {"worker": task.index, "step": session.global_step, "weights": model.state_dict()}


def test_every_workers_result_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = tq.launch(train, 20, workers=2, ps=2, rule=tq.Sync())
    assert (first["worker"], second["worker"]) == (0, 1) and first["step"] == second["step"] == 20
    assert torch.equal(first["weights"]["weight"], second["weights"]["weight"])
    assert first["weights"]["weight"].shape == (2, 3)
    shown = capfd.readouterr().out
    assert "[worker 0] worker 0 is done" in shown and "[worker 1] worker 1 is done" in shown


def test_a_worker_that_fails_is_named_with_its_last_lines() -> None:
    with pytest.raises(tq.LaunchError, match=r"(?s)/job:worker/task:1 failed.*RuntimeError: told to fail"):
        tq.launch(train, 1_000_000, workers=2, fail=1, quiet=True)


def test_a_worker_that_is_killed_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = tq.launch(train, 400, workers=2, kill=tmp_path / "killed")
    assert first["step"] == 400 and (second is None or second["step"] == 400)  # the run may end before it is back
    assert "/job:worker/task:1 was ended by SIGKILL; restarting it (1 of 3)" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("given", "keywords", "text"),
    [
        ("train", {}, "give it a function"),
        (train, {}, "cannot be called with these arguments: missing a required argument: 'steps'"),
        (train, {"steps": 1, "workers": 0}, "--workers 0: must be 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(given: Any, keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tq.launch(given, **keywords)


def test_only_plain_data_comes_back() -> None:
    with pytest.raises(tq.LaunchError, match=r"(?s)returned Linear; only plain data.*state_dict"):
        tq.launch(lambda: nn.Linear(1, 1) if train(1) else None, workers=1, quiet=True)


def test_values_survive_the_way_back() -> None:
    given = [1, 2.5, "text", None, True, b"bytes", {"nested": [torch.ones(2, 2, dtype=torch.bfloat16), torch.empty(0)]}]

    def give() -> Any:
        train(1)
        return given

    (back,) = tq.launch(give, workers=1, quiet=True)
    assert back[:6] == given[:6]
    assert torch.equal(back[6]["nested"][0], torch.ones(2, 2, dtype=torch.bfloat16))
    assert back[6]["nested"][1].shape == (0,)


def test_a_function_that_trains_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchquorum.launcher.launched.PS_GRACE_S", 1.0)
    with pytest.raises(tq.LaunchError, match="no worker began a session"):
        tq.launch(lambda: None, workers=1, quiet=True)


SCRIPT = """
import time
import torchquorum as tq
from torch import nn
import torch

def train():
    task = tq.join()
    model = nn.Linear(1, 1)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    with tq.Session(task, model, optimizer) as session:
        while not session.should_stop():
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            print("at work", flush=True)
            time.sleep(0.05)

tq.launch(train, workers=2)
"""


def test_ctrl_c_ends_every_task(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "[worker 1] at work" in line:
            break
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 3
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
