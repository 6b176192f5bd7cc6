"""`torchquorum data` as a user runs it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TORCHQUORUM = [sys.executable, "-m", "torchquorum.cli.main"]
GOLDEN = Path(__file__).parents[1] / "golden" / "mnist_200.tfrecords"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TORCHQUORUM, *arguments], capture_output=True, text=True, timeout=100, cwd=cwd, check=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_mnist_becomes_the_file_that_tensorflow_wrote_and_inspect_shows_it(tmp_path: Path) -> None:
    """The golden file has the first 200 images of MNIST's training file, which are the first for validation."""
    done = run("data", "tfrecord", "--split=validation", "--limit=200", "--output=out/v.tfrecords", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "v.tfrecords").read_bytes() == GOLDEN.read_bytes()
    assert "wrote         out/v.tfrecords: 200 examples, 0.2 MB" in done.stdout
    following = done.stdout.split("try next      torchquorum ")[1].split()
    shown = run(*following, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "out/v.tfrecords: 200 records, 0.2 MB of data, 0.2 MB on disk, all checksums good" in shown.stdout
    assert [line.split() for line in shown.stdout.splitlines()[-3:]] == [
        ["'pixels'", "int64_list", "1", "784"],
        ["'label'", "int64_list", "1", "5"],
        ["'image_raw'", "bytes_list", "1", "784", "bytes"],
    ]


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*TORCHQUORUM, "data", "tfrecord", "--compression=gzip", "--output=out/mnist"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "out").is_dir() or not names(tmp_path / "out"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"interrupted" in errors
    assert names(tmp_path / "out") == []
