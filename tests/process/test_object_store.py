"""A run whose folder is on an object store: a ps is killed in mid-training, and the result is as if it had not been."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.process.tasks import Started
from tests.s3 import s3_server

PROGRAM = Path(__file__).parent / "learns.py"
TORCHQUORUM = [sys.executable, "-m", "torchquorum.cli.main"]


def digests(run: Started) -> set[str]:
    assert run.wait() == 0, run.tail()
    return set(re.findall(r"digest (\w+)", "\n".join(run.lines)))


def test_a_run_on_s3_whose_ps_is_killed_ends_as_one_that_was_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Started] = []

    def run(*arguments: str) -> Started:
        started.append(Started([*TORCHQUORUM, *arguments]))
        return started[-1]

    with s3_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        try:
            train = ("run", "--ps=2", "--workers=2", str(PROGRAM))
            whole = digests(run(*train, "--logdir=s3://bucket/whole"))
            cut = run(*train, "--logdir=s3://bucket/cut", "--pause=0.02")
            pid = int(re.search(r"process (\d+)", cut.until("/job:ps/task:1: serving"))[1])  # type: ignore[index]
            cut.until("saved s3://bucket/cut/model.ckpt-")
            cut.until("global 24 ")
            os.kill(pid, signal.SIGKILL)
            assert digests(cut) == whole and len(whole) == 1
            text = "\n".join(cut.lines)
            assert "/job:ps/task:1 was ended by SIGKILL; starting it again" in text
            assert "restoring s3://bucket/cut/model.ckpt-" in text
            for name in ("whole", "cut"):
                exported = run("export", f"s3://bucket/{name}", str(tmp_path / f"{name}.safetensors"))
                assert exported.wait() == 0, exported.tail()
            listed = run("checkpoints", "s3://bucket/cut", "--verify")
            assert listed.wait() == 0 and listed.tail().count(" good") == 5, listed.tail()
        finally:
            for task in started:
                task.end()
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "cut"))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
