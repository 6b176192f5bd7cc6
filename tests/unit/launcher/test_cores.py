"""How a launcher divides the cores among its workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchquorum.launcher.cores import settle, share_of

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system keeps no process on a core")


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ({0, 1}, 2, [{0}, {1}]),
        ({0, 1, 2, 3}, 2, [{0, 1}, {2, 3}]),
        ({4, 6, 8}, 3, [{4}, {6}, {8}]),
        ({0, 1, 2}, 2, [None, None]),
        ({0, 1}, 3, [None, None, None]),
        ({0, 1, 2, 3}, 1, [None]),
    ],
)
def test_workers_get_equal_shares_or_none_gets_one(
    cores: set[int], workers: int, shares: list[set[int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert [share_of(k, workers) for k in range(workers)] == shares


def test_a_process_that_is_gone_is_let_be() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert settle(gone.pid, {0}) is None


def test_each_worker_of_a_launcher_stays_on_its_share_and_a_ps_goes_anywhere(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) % 2:
        pytest.skip("an odd number of cores is not divided among two workers")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, json, time\n"
        "given = json.loads(os.environ['TORCHQUORUM_TASK'])\n"
        "wanted = set(json.loads(os.environ['WANTED'])) if given['job'] == 'worker' else None\n"
        "deadline = time.monotonic() + 60\n"
        "while wanted is not None and len(os.sched_getaffinity(0)) != len(wanted) // 2 and time.monotonic() < deadline:\n"
        "    time.sleep(0.01)\n"
        "print('cores of', given['job'], given['index'], sorted(os.sched_getaffinity(0)))\n"
    )
    command = [sys.executable, "-m", "torchquorum.cli.main", "run", "--workers", "2", str(script)]
    environment = {**os.environ, "WANTED": str(cores)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    half = len(cores) // 2
    assert f"cores of worker 0 {cores[:half]}" in done.stdout, done.stdout + done.stderr
    assert f"cores of worker 1 {cores[half:]}" in done.stdout
    assert f"cores of ps 0 {cores}" in done.stdout
