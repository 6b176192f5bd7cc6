"""Placement, soft placement and the log with a second device, which torch lets us register; one process for all checks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration

from tests.process import on_second_device

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    or not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="there is a GPU, which test_devices_cuda.py uses; or this torch takes no backend in Python",
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.process.on_second_device", str(tmp_path_factory.mktemp("run"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", on_second_device.CHECKS)
def test_on_a_second_device(check: str, failed: dict[str, str]) -> None:
    assert check not in failed, failed[check]
