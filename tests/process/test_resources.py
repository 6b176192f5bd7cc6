"""What a task needs and does not get: memory, files, disk, a writable folder. It says so or does without; nothing breaks."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.forked import Cluster
from tests.unit.formats.checkpoints import left_by_the_dead
from torchquorum.formats.checkpoint import list_checkpoints
from torchquorum.formats.in_use import user_of
from torchquorum.formats.scratch import clear_left_behind, scratch_folder


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which is soon full."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(mount)], capture_output=True, timeout=60, check=False
    )
    if done.returncode != 0:
        pytest.skip("needs root, to mount a small file system")
    yield mount
    subprocess.run(["umount", str(mount)], timeout=60, check=True)


def finished(cluster: Cluster) -> str:
    """Waits for the end of all tasks, whatever it is, and returns what was printed."""
    try:
        cluster.wait("the end", cluster.ended)
    finally:
        cluster.close()
    return "\n".join(cluster.text(task) for task in cluster.lives)


def test_shared_memory_that_is_too_small_is_replaced_by_tcp(tmp_path: Path) -> None:
    # 3 MB of parameters; files, and with them memory segments, may have 1 MB in worker 1.
    limits = {("worker", 1): {"FSIZE": 1 << 20}}
    cluster = Cluster(tmp_path / "a", 1, "--steps=12", "--width=30000", "--save-steps=100", limits=limits)
    text = finished(cluster)
    assert cluster.codes() == [0, 0, 0], text[-3000:]
    assert "no shared memory of" in cluster.text(("worker", 1)) and "using TCP instead" in cluster.text(("worker", 1))
    assert "over tcp" in cluster.text(("worker", 1)) and "over shm" in cluster.text(("worker", 0))


@pytest.mark.parametrize("files", [20, 28])
def test_a_ps_without_a_file_to_open_serves_or_says_so(tmp_path: Path, files: int) -> None:
    cluster = Cluster(tmp_path / "a", 1, "--steps=12", "--start=6", limits={("ps", 0): {"NOFILE": files}})
    # One that cannot even accept a connection waits for the chief, for an hour: the workers are who notices.
    workers = [cluster.lives[task] for task in cluster.workers]
    try:
        cluster.wait("the workers' end", lambda: all(life.poll() is not None for life in workers))
        text = "\n".join(cluster.text(task) for task in cluster.lives)
        if [life.poll() for life in workers] == [0, 0]:
            cluster.wait("the end", cluster.ended)
    finally:
        cluster.close()
    if cluster.codes() == [0, 0, 0]:
        assert "counts as dead" not in text
        for info in list_checkpoints(cluster.logdir):
            assert info.problem is None
    else:
        assert "Too many open files" in text or "gave up" in text, text[-3000:]


def test_a_worker_that_runs_out_of_memory_ends_the_run_with_its_error_and_what_was_saved_stays(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "a", 1, "--steps=400", "--save-steps=5", "--fail-at=20", "--start=5")
    cluster.wait("a checkpoint", lambda: list_checkpoints(cluster.logdir))
    assert user_of(cluster.logdir) == f"process {cluster.lives['ps', 0].pid}"  # no other run may begin there
    cluster.wait("its end", lambda: "no memory is left" in cluster.text(("worker", 1)))
    cluster.lives["worker", 0].terminate()
    text = finished(cluster)
    assert cluster.lives["worker", 1].poll() == 1 and "MemoryError" in text
    assert cluster.lives["ps", 0].poll() == 1 and "failed and did not come back" in cluster.text(("ps", 0))
    assert user_of(cluster.logdir) is None
    infos = list_checkpoints(cluster.logdir)
    assert infos and all(info.problem is None for info in infos)


def test_a_durable_run_on_a_full_disk_stops_and_goes_on_with_all_it_told_when_there_is_room(
    tmp_path: Path, tiny_disk: Path
) -> None:
    options = ("--steps=150", "--save-steps=1000", "--durable=write", "--start=5")
    cluster = Cluster(tmp_path / "a", 1, *options, logdir=tiny_disk)
    text = finished(cluster)
    assert cluster.codes()[0] == 1
    assert "cannot be written (No space left on device); the disk is full" in text and "Traceback" not in text
    told = cluster.told()
    assert 5 < told < 150
    subprocess.run(["mount", "-o", "remount,size=20m", str(tiny_disk)], timeout=60, check=True)
    again = Cluster(tmp_path / "b", 1, *options, logdir=tiny_disk)
    finished(again)
    assert again.codes() == [0, 0, 0]
    assert f"started at {told} " in again.text(("worker", 0)) or f"started at {told + 1} " in again.text(("worker", 0))
    assert list_checkpoints(tiny_disk)[-1].step == 150


@pytest.mark.parametrize("durable", [(), ("--durable=write",)], ids=["plain", "durable"])
def test_a_folder_that_is_read_only_is_refused_before_the_first_step(
    durable: tuple[str, ...], tmp_path: Path, tiny_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], timeout=60, check=True)
    refused = Cluster(tmp_path / "a", 1, "--steps=12", "--start=4", *durable, logdir=tiny_disk / "run")
    refused.wait("the refusal", lambda: "cannot be written to: Read-only file system" in refused.text(("worker", 0)))
    refused.wait("its end", lambda: refused.lives["worker", 0].poll() is not None)
    refused.close()
    assert refused.lives["worker", 0].poll() == 1 and "Traceback" not in refused.text(("worker", 0))
    assert "told" not in refused.text(("worker", 0))


def test_the_folder_of_a_killed_command_is_removed_by_the_next_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder() as living:
        left = left_by_the_dead(living)
        stranger = tmp_path / "torchquorum-notes"
        stranger.mkdir()
        assert clear_left_behind(tmp_path) == [left]
        assert living.is_dir() and stranger.is_dir() and not left.exists()
    assert not living.exists()
