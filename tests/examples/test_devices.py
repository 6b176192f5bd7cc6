"""The tutorials' placement programs, as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.process.tasks import DEADLINE_S
from tests.process.zygote import run_python

FOLDER = Path(__file__).parents[2] / "examples" / "devices"
MISSING = f"/gpu:{torch.cuda.device_count() + 3}"
THERE = "/job:worker/task:0/device:CPU:0"


def run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_python([sys.executable, str(FOLDER / program), *flags], os.environ, timeout_s=DEADLINE_S)


def test_the_placement_log_has_a_line_per_constant_and_operation() -> None:
    lines = run("placement_log.py").stdout.splitlines()
    assert lines[0] == "Device mapping:" and lines[-1] == "[2. 4. 6.]"
    assert [line for line in lines if line.startswith(("a:", "b:", "add"))] == [
        f"a: (Const): {THERE}",
        f"b: (Const): {THERE}",
        f"add: (aten.add.Tensor): {THERE}",
    ]


def test_a_device_by_hand_that_is_not_there_is_an_error_that_names_operation_wish_and_stock() -> None:
    done = run("manual_devices.py", f"--device={MISSING}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    number = MISSING.split(":")[1]
    assert "operation add: was put on" in last and f"CUDA:{number}, but there is no such device" in last
    assert f"Available: {THERE}" in last and "allow_soft_placement=True" in last


def test_soft_placement_uses_the_cpu_and_says_so_once() -> None:
    done = run("soft_placement.py", f"--device={MISSING}")
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert shown.count("because allow_soft_placement is on") == 1
    assert f"add: (aten.add.Tensor): {THERE}" in shown and "[2. 4. 6.]" in shown
    assert run("soft_placement.py", f"--device={MISSING}", "--no-soft").returncode == 1
