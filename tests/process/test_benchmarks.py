"""The benchmarks run: real clusters for a moment each; the figures mean nothing here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str, timeout_s: float = 350) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_harness_measures_prints_and_keeps(tmp_path: Path) -> None:
    said = bench("--quick", "--only=bandwidth,decisions", f"--output={tmp_path}", "--tensorflow=")
    kept = {json.loads(path.read_text())["kind"]: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(kept) == {"bandwidth", "decisions"}
    assert {row["transport"] for row in kept["bandwidth"]["rows"]} == {"shm", "tcp"}
    assert "floors met" in said


@pytest.mark.long
def test_speed_is_measured_beside_independent_trainers(tmp_path: Path) -> None:
    said = bench("--quick", "--only=speed", "--speed-only=async shm", f"--output={tmp_path}", "--tensorflow=")
    (kept,) = (json.loads(path.read_text()) for path in tmp_path.iterdir())
    rows = {row["name"]: row for row in kept["rows"]}
    assert set(rows) == {"independent", "async shm"}
    assert all(row["batches_per_s"] > 0 and row["cpu_ms_per_batch"] > 0 for row in rows.values())
    assert "of independent" in said and "TensorFlow was not measured" in said
