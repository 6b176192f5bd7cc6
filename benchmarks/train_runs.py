"""Runs of `torchquorum train` for benchmarks: one call, one report. Used by encryption.py and hostile.py."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchquorum.env import child_environment


def train(
    model: str,
    rule: str,
    seconds: float,
    transport: str,
    environment: Mapping[str, str],
    beside: Callable[[str], list[subprocess.Popen[str]]] | None = None,
) -> dict[str, Any]:
    """Trains for a while and returns the report; `beside` is given the address of the ps, and starts what runs beside it."""
    with tempfile.TemporaryDirectory(prefix="tq-bench-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "torchquorum.cli.main", "train", f"--model={model}", f"--rule={rule}"]
        command += [f"--seconds={seconds}", f"--transport={transport}", f"--report={report}", f"--logdir={folder}/run"]
        run = subprocess.Popen(
            command, env=child_environment(**environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        others: list[subprocess.Popen[str]] = []
        try:
            others = beside(_address_of(run.pid)) if beside is not None else []
            output, _ = run.communicate(timeout=seconds + 240)
        finally:
            for other in others:
                other.kill()
                other.wait()
            if run.poll() is None:
                run.kill()
                run.wait()
        if not report.is_file():
            raise RuntimeError(f"no report; the run printed:\n{output}")
        return json.loads(report.read_text())


def _address_of(launcher: int) -> str:
    """Returns where the ps of a launcher listens, as its children's environment says."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            try:
                if (
                    not entry.name.isdigit()
                    or int((entry / "stat").read_text().rpartition(")")[2].split()[1]) != launcher
                ):
                    continue
                for variable in (entry / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"TORCHQUORUM_TASK="):
                        return json.loads(variable.partition(b"=")[2])["cluster"]["ps"][0]
            except (OSError, ValueError, IndexError):
                continue
        time.sleep(0.05)
    raise RuntimeError("the run started no ps")
