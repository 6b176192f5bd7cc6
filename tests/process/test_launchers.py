"""The example program, unchanged, under launchers that are not ours: the real torchrun, and a real Slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.process import slurm
from tests.process.tasks import Started
from torchquorum.cluster.slurm import expand_hosts
from torchquorum.formats.checkpoint import newest_good

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
