"""The example program, unchanged, under launchers that are not ours: the real torchrun, and a real Slurm."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.process import slurm
from tests.process.tasks import Started
from torchquorum.cluster.slurm import expand_hosts
from torchquorum.formats.checkpoint import list_checkpoints, newest_good

ENDING = Path(__file__).parent / "ending_program.py"
EXAMPLE = Path(__file__).parents[2] / "examples/mnist/train_quorum.py"


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    started = Started(command, env)
    try:
        code = started.wait()
    finally:
        started.end()
    text = "\n".join(started.lines)
    assert code == 0, text
    return text


def assert_trained(text: str, folder: Path, source: str) -> None:
    for task in ("/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"):
        assert re.search(rf"{task}: cluster from {re.escape(source)} \(.*3 tasks: 1 ps, 2 workers\)", text), text
    assert "/job:worker/task:0 joined" in text
    found, _ = newest_good(folder)
    assert found is not None and found[1].step == 12
    accuracy = re.search(r"test accuracy (\d+)", text)
    assert accuracy is not None and int(accuracy[1]) > 30, text


def test_torchrun_of_three_processes_trains_with_one_ps_and_two_workers(tmp_path: Path) -> None:
    (port,) = free_ports(1)  # torchrun's own is always the same
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={port}"]
    text = run(
        [*launcher, str(EXAMPLE), "--steps=12", f"--logdir={tmp_path}"], {"TF_CONFIG": "{}", "TMPDIR": str(tmp_path)}
    )
    assert_trained(text, tmp_path, "torchrun")


@pytest.mark.skipif(slurm.why_not() is not None, reason=f"Slurm {slurm.why_not()}")
def test_srun_of_three_tasks_trains_with_one_ps_and_two_workers(tmp_path: Path) -> None:
    with slurm.slurm(tmp_path / "slurm") as variables:
        program = [sys.executable, str(EXAMPLE), "--steps=12", f"--logdir={tmp_path / 'run'}"]
        text = run(["srun", "--ntasks=3", "--overcommit", *program], variables)
        assert_trained(text, tmp_path / "run", "SLURM_*")
        assert re.search(r"\(job \d+, 3 tasks", text)
        for hosts in ("n[1-3,07-09],gpu-a[0-1]", "a,b[098-101]"):
            show = ["scontrol", "show", "hostnames", hosts]
            theirs = subprocess.run(
                show, env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=60
            )
            assert expand_hosts(hosts, label="X") == theirs.stdout.split()


# -- exit codes: the table of docs/faults.md ------------------------------------------------------------------------


def begin(command: list[str], env: dict[str, str], folder: Path, *flags: str) -> Started:
    return Started([*command, str(ENDING), f"--logdir={folder}", *flags], env)


STOPPED = r"SIGTERM: the run was stopped at global step \d+, which is saved; the next start goes on from there"


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--raises=1"], [r"task:1 counts as dead \(its program failed: ValueError: boom\)", STOPPED]),
        (["--schedule-ends=30"], [r"the update to version 31 failed \(ValueError: ", "The last good checkpoint is "]),
        ([], [STOPPED]),
    ],
    ids=str,
)
def test_under_torchrun_what_fails_is_1_and_the_rest_is_stopped_and_saved(
    flags: list[str], said: list[str], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={port}"]
    started = begin(launcher, {"TMPDIR": str(tmp_path)}, tmp_path / "run", "--last-step=100000", *flags)
    try:
        if not flags:
            started.until("model.ckpt-")
            started.process.send_signal(signal.SIGTERM)  # torchrun hands it on, and ends with 1 itself
        assert started.wait() == 1, started.tail()
        text = "\n".join(started.lines)
        assert all(re.search(line, text) for line in said), text
        assert list_checkpoints(tmp_path / "run")
    finally:
        started.end()


@pytest.mark.long
@pytest.mark.skipif(slurm.why_not() is not None, reason=f"Slurm {slurm.why_not()}")
def test_under_slurm_every_task_has_its_own_code_and_srun_the_highest(tmp_path: Path) -> None:
    with slurm.slurm(tmp_path / "slurm") as variables:
        launcher = ["srun", "--ntasks=3", "--overcommit", sys.executable]
        raises = begin(launcher, variables, tmp_path / "raises", "--raises=1")
        try:
            assert raises.wait() == 1, raises.tail()
            text = "\n".join(raises.lines)
            assert re.search(r"task 2: Exited with exit code 1", text) and "finished at 60" in text, text
            assert not re.search(r"task 1: Exited", text), "the chief has finished and saved"
            assert list_checkpoints(tmp_path / "raises")[-1].step == 60
        finally:
            raises.end()
        stopped = begin(launcher, variables, tmp_path / "stopped", "--last-step=100000")
        try:
            stopped.until("task:1 joined")  # before that a signal ends a task as any program
            stopped.until("model.ckpt-")
            cancel = ["scancel", "--signal=TERM", f"--user={os.environ.get('USER', 'root')}"]
            subprocess.run(cancel, env={**os.environ, **variables}, check=True, timeout=60)
            assert stopped.wait() == 130, stopped.tail()
            text = "\n".join(stopped.lines)
            assert "which is saved; the next start goes on from there" in text, text
        finally:
            stopped.end()
