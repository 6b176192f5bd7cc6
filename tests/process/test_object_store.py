"""A run whose folder is on an object store: a ps is killed in mid-training, and the result is as if it had not been."""

import os
import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.process.tasks import FORKING, Started
from tests.s3 import s3_server
from torchquorum.formats.checkpoint import newest_good
from torchquorum.formats.checkpoint_write import export
from torchquorum.formats.storage import locate

PROGRAM = Path(__file__).parent / "learns.py"


def digests(run: Started) -> set[str]:
    assert run.wait() == 0, run.tail()
    return set(re.findall(r"digest (\w+)", "\n".join(run.lines)))


@pytest.mark.library_keeps_sockets
def test_a_run_on_s3_whose_ps_is_killed_ends_as_one_that_was_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a ps that is killed leaves there what it was putting
    started: list[Started] = []

    def train(name: str, *arguments: str) -> Started:
        command = ["run", "--ps=2", "--workers=2", str(PROGRAM), f"--logdir=s3://bucket/{name}", "--steps=30"]
        started.append(Started([*FORKING, *command, *arguments], forked=True))
        return started[-1]

    with s3_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        try:
            whole = digests(train("whole"))
            cut = train("cut", "--hold-at=16", f"--hold-until={tmp_path / 'go-on'}")
            pid = re.search(r"process (\d+)", cut.until("/job:ps/task:1: serving"))
            assert pid is not None
            cut.until("saved s3://bucket/cut/model.ckpt-")
            os.kill(int(pid[1]), signal.SIGKILL)
            (tmp_path / "go-on").touch()
            assert digests(cut) == whole and len(whole) == 1
        finally:
            for task in started:
                task.end()
        text = "\n".join(cut.lines)
        assert "/job:ps/task:1 was ended by SIGKILL; restarting it" in text
        assert "restoring s3://bucket/cut/model.ckpt-" in text
        states = []
        for name in ("whole", "cut"):
            found, skipped = newest_good(locate(f"s3://bucket/{name}"))
            assert found is not None and found[1].step == 30 and not skipped
            export(found[0], tmp_path / f"{name}.safetensors")
            states.append(load_file(tmp_path / f"{name}.safetensors"))
    assert states[0].keys() == states[1].keys()
    assert all(states[0][name].equal(states[1][name]) for name in states[0])
