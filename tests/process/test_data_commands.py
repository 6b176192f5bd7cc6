"""`torchquorum data` as a user runs it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchquorum as tq

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


def test_shards_hold_every_image_once_and_are_not_overwritten_unasked(tmp_path: Path) -> None:
    done = run("data", "tfrecord", "--split=test", "--limit=1003", "--shards=4", "--compression=gzip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "mnist") == [f"test-0000{i}-of-00004" for i in range(4)]
    assert "mnist/test-00000-of-00004 to test-00003-of-00004, 4 files: 1,003 examples" in done.stdout
    features = {"label": tq.FixedLenFeature([], "int64")}
    labels = [x["label"].item() for x in tq.TFRecordDataset(str(tmp_path / "mnist" / "test-*"), features)]
    assert labels == tq.load_mnist().test.labels[:1003].tolist()

    again = run("data", "tfrecord", "--split=test", "--limit=5", "--shards=4", cwd=tmp_path)
    assert again.returncode == 2 and "and 3 more: there already; --force replaces it" in again.stderr
    other = run("data", "tfrecord", "--split=test", "--limit=5", "--shards=2", cwd=tmp_path)
    assert other.returncode == 2 and "is one of another number of shards, and test-* would read both" in other.stderr
    forced = run("data", "tfrecord", "--split=test", "--limit=5", "--shards=2", "--force", cwd=tmp_path)
    assert forced.returncode == 0, forced.stderr
    assert names(tmp_path / "mnist") == ["test-00000-of-00002", "test-00001-of-00002"]


def test_inspect_names_all_damage_and_goes_on_where_it_can(tmp_path: Path) -> None:
    body = bytearray(GOLDEN.read_bytes())
    body[860 * 3 + 100] ^= 1
    body[860 * 150 + 100] ^= 1
    (tmp_path / "bad").write_bytes(body[: 860 * 180 + 7])
    (tmp_path / "text").write_text("no records, but some text that anybody may have written")
    done = run("data", "inspect", "bad", cwd=tmp_path)
    assert done.returncode == 1
    assert "bad: 180 records" in done.stdout and "DAMAGED" in done.stdout
    for record, offset in ((3, 860 * 3), (150, 860 * 150), (180, 860 * 180)):
        assert f"bad: record {record}, at byte {offset}: " in done.stdout
    assert "the file ends in the record's length, after 7 of 12 bytes" in done.stdout
    text = run("data", "inspect", "text", cwd=tmp_path)
    assert text.returncode == 1 and "text: record 0, at byte 0: " in text.stdout
    assert "is this a TFRecord file" in text.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nothing-*"], "nothing-*: no file matches"),
        (["inspect", "nowhere"], "nowhere: there is no such file"),
        (["tfrecord", "--limit=3", "--shards=5"], "--shards 5: there are only 3 images"),
        (
            ["tfrecord", "--limit=3", "--shards=2", "--output=file"],
            "--output file: is a file, and --shards wants a folder",
        ),
        (["tfrecord", "--limit=3", "--output=file/x"], "the folder cannot be made"),
        (["tfrecord", "--compression=bz2"], "bz2"),
        (["tfrecord", "--shards=0"], "--shards"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("data", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert names(tmp_path) == ["file"]


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
