"""Writing checkpoints: no death, full disk or second save loses one; the last five are kept."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.formats.checkpoints import child, example, flip, found_step, hidden, run_child, save
from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import (
    CheckpointError,
    CheckpointReader,
    FileInfo,
    Manifest,
    Stored,
    list_checkpoints,
    newest_good,
    next_created_at,
    verify,
)
from torchquorum.formats.checkpoint_write import (
    abandon,
    begin,
    export,
    part_name,
    prune,
    publish,
    write_part,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("run"), 7)


# Names, order, how many are kept.


def test_a_folder_that_does_not_exist_has_no_checkpoints(tmp_path):
    assert list_checkpoints(tmp_path / "none") == [] and newest_good(tmp_path / "none") == (None, [])
    assert prune(tmp_path / "none") == []


def test_a_checkpoint_counts_as_created_after_all_others_even_if_the_clock_went_back(tmp_path):
    assert next_created_at(tmp_path, 5.0) == 5.0
    save(tmp_path, 10)
    created = list_checkpoints(tmp_path)[0].created_at
    assert (
        next_created_at(tmp_path, created - 3600.0) > created
        and next_created_at(tmp_path, created + 9.0) == created + 9.0
    )


def test_checkpoints_are_ordered_by_step_and_other_names_are_left_alone(tmp_path):
    for step in (10, 9, 100):
        save(tmp_path, step)
    (tmp_path / "model.ckpt-1a").mkdir()
    (tmp_path / "events").write_text("x")
    infos = list_checkpoints(tmp_path)
    assert [info.step for info in infos] == [9, 10, 100] and {info.problem for info in infos} == {None}
    assert all(info.size_bytes > 1000 and info.path.name == f"model.ckpt-{info.step}" for info in infos)


def test_a_checkpoint_that_was_renamed_to_another_step_is_not_believed(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "model.ckpt-20")
    assert found_step(tmp_path) == 1
    assert "holds step 2" in (list_checkpoints(tmp_path)[1].problem or "")


def test_the_last_five_are_kept(tmp_path):
    for step in range(8):
        save(tmp_path, step, {("variable", "w", ""): torch.ones(2)})
        prune(tmp_path)
    assert [info.step for info in list_checkpoints(tmp_path)] == [3, 4, 5, 6, 7] and hidden(tmp_path) == []


def test_damaged_checkpoints_do_not_push_out_good_ones(tmp_path):
    for step in range(6):
        save(tmp_path, step, {("variable", "w", ""): torch.ones(2)})
    for step in (3, 4, 5):
        (tmp_path / f"model.ckpt-{step}" / "manifest.json").unlink()
    assert [path.name for path in prune(tmp_path, keep=2)] == ["model.ckpt-0"]
    assert found_step(tmp_path) == 2


def test_older_ones_that_are_damaged_are_moved_aside_and_not_removed(tmp_path):
    for step in range(5):
        save(tmp_path, step, {("variable", "w", ""): torch.ones(2)})
    for step in (0, 1):
        (tmp_path / f"model.ckpt-{step}" / "manifest.json").unlink()
    assert [path.name for path in prune(tmp_path, keep=2)] == ["model.ckpt-2"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["model.ckpt-0.damaged", "model.ckpt-1.damaged", "model.ckpt-3", "model.ckpt-4"]


def test_a_damaged_one_of_the_same_step_is_moved_aside_and_not_written_over(tmp_path):
    flip(save(tmp_path, 4) / "part-00000-of-00003.safetensors", 300)
    save(tmp_path, 4)
    assert found_step(tmp_path) == 4 and hidden(tmp_path) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.ckpt-4", "model.ckpt-4.damaged"]
    assert len(list((tmp_path / "model.ckpt-4.damaged").iterdir())) == 4


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep=0"):
        prune(tmp_path, keep=0)


def test_the_same_step_saved_twice_leaves_the_second_and_nothing_else(tmp_path):
    save(tmp_path, 4, example(1), num_ps=3)
    for seed in (2, 3):
        path = save(tmp_path, 4, example(seed), num_ps=2)
    assert verify(path) is None and hidden(tmp_path) == []
    with CheckpointReader(path) as reader:
        assert torch.equal(reader.read("variable", "count"), example(3)["variable", "count", ""].reshape(1))
    assert len(list(path.iterdir())) == 3


def test_a_step_saved_again_with_a_missing_part_keeps_the_first(tmp_path):
    save(tmp_path, 4)
    partial = begin(tmp_path, 4)
    files = {part_name(0, 1): write_part(partial, 0, 1, {"w": torch.ones(2)}), part_name(1, 2): FileInfo(8, "0" * 64)}
    with pytest.raises(CheckpointError, match="part-00001-of-00002.safetensors is missing"):
        publish(partial, Manifest(step=4, num_ps=1, pieces=[], files=files))
    assert found_step(tmp_path) == 4 and hidden(tmp_path) == []


def test_parts_that_make_no_whole_are_not_published(tmp_path):
    partial = begin(tmp_path, 4)
    files = {part_name(0, 1): write_part(partial, 0, 1, {"w": torch.ones(2)})}
    half = Stored(
        kind="variable", variable="w", file=part_name(0, 1), key="w", start=0, stop=2, shape=(4,), dtype="float32"
    )
    with pytest.raises(CheckpointError, match="variable w: its slices end at element 2 of 4"):
        publish(partial, Manifest(step=4, num_ps=1, pieces=[half], files=files))
    assert list(tmp_path.iterdir()) == []


# Deaths: a real process, really killed.

KILLED_AT_EVERY_CALL = """
    # One process per call that changes something on disk: it saves one checkpoint and dies right before that call.
    root, before = Path(sys.argv[1]), int(sys.argv[2])
    real = {name: getattr(os, name) for name in ("mkdir", "chmod", "fsync", "rename", "replace", "unlink", "rmdir")}

    def fragile(name, deadline, seen):
        def call(*args, **kwargs):
            seen.append(name)
            if len(seen) == deadline:
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*args, **kwargs)
        return call

    for deadline in range(1, 200):
        folder = root / str(deadline)
        for step in range(1, before + 1):
            save(folder, step, example(step))
        pid = os.fork()
        if pid == 0:
            seen = []
            for name in real:
                setattr(os, name, fragile(name, deadline, seen))
            save(folder, 2, example(3))
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0, status
            break
    print(deadline)
"""


@pytest.mark.parametrize("before", [1, 2], ids=["new step", "same step"])
def test_a_kill_before_any_change_on_disk_leaves_the_older_one_or_the_whole_new_one(tmp_path, before):
    instants = int(run_child(KILLED_AT_EVERY_CALL, tmp_path, before))
    assert instants > 12
    for instant in range(1, instants + 1):
        folder = tmp_path / str(instant)
        found, skipped = newest_good(folder)
        assert found and skipped == []
        path, manifest = found
        assert manifest.step >= before
        with CheckpointReader(path, manifest) as reader:
            count = reader.read("variable", "count").item() - (2**53 + 1)
        assert count == 3 if instant == instants else count in (before, 3)
        prune(folder)
        assert hidden(folder) == []
        save(folder, 2, example(4))
        assert found_step(folder) == 2


@pytest.mark.long
def test_a_kill_in_the_middle_of_a_large_part_leaves_the_older_one(tmp_path):
    save(tmp_path, 1)
    body = 'save(Path(sys.argv[1]), 2, {("variable", "w", ""): torch.ones(64 << 20)}, num_ps=1)'
    caught = 0
    for size_bytes in (1, 30 << 20, 60 << 20):
        process = subprocess.Popen(child(body, tmp_path))
        while bytes_in_progress(tmp_path) < size_bytes and process.poll() is None:
            time.sleep(0.001)
        process.kill()
        process.wait()
        caught += process.returncode == -signal.SIGKILL and len(hidden(tmp_path)) == 1
        if (tmp_path / "model.ckpt-2").exists():  # it was faster than we
            assert found_step(tmp_path) == 2
            shutil.rmtree(tmp_path / "model.ckpt-2")
        assert found_step(tmp_path) == 1
        prune(tmp_path)
        assert hidden(tmp_path) == [] and found_step(tmp_path) == 1
    assert caught


def bytes_in_progress(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.glob(".*/.tmp*"))
    except FileNotFoundError:  # renamed while we looked
        return 0


def test_a_partial_folder_goes_when_its_writer_is_dead_or_an_hour_passed_and_not_before(tmp_path):
    ours, old, elsewhere = begin(tmp_path, 1), begin(tmp_path, 2), begin(tmp_path, 3)
    far = elsewhere.rename(tmp_path / ".model.ckpt-3.partial-0123456789ab-1-00ff00ff")
    long_ago = time.time() - 4000
    os.utime(old, (long_ago, long_ago))
    assert prune(tmp_path) == [old]
    os.utime(far, (long_ago, long_ago))
    (far / "part").write_text("still being written")
    assert prune(tmp_path) == []
    abandon(ours)
    assert hidden(tmp_path) == [far.name]


# A disk that refuses.


def assert_only_the_first_is_left(folder: Path) -> None:
    assert found_step(folder) == 1 and [path.name for path in folder.iterdir()] == ["model.ckpt-1"]


@pytest.fixture
def tiny_disk(tmp_path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(mount)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root and the right to mount")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_is_reported_and_nothing_older_is_lost(tiny_disk):
    save(tiny_disk, 1)
    with pytest.raises(CheckpointError, match=r"writing part-0000\d-of-00003.* the disk is full: free some space"):
        save(tiny_disk, 2, example(2, scale=1000))
    assert_only_the_first_is_left(tiny_disk)
    save(tiny_disk, 3)
    assert found_step(tiny_disk) == 3


@pytest.mark.parametrize("step", [1, 2], ids=["same step", "new step"])
def test_a_disk_that_fills_up_at_any_kilobyte_loses_nothing_older(tiny_disk, step):
    save(tiny_disk, 1)
    for free_kb in (40, 24, 16, 8, 4, 0):
        filler = tiny_disk / "filler"
        status = os.statvfs(tiny_disk)
        filler.write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - free_kb * 1024)))
        with pytest.raises(CheckpointError, match="the disk is full"):
            save(tiny_disk, step, example(2, scale=20))
        filler.unlink()
        assert_only_the_first_is_left(tiny_disk)


LIMITED = """
    import resource
    from torchquorum.errors import TorchQuorumError

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        save(Path(sys.argv[1]), 2, example(2, scale=1000))
    except TorchQuorumError as error:
        print(type(error).__name__, error)
"""


def test_a_limit_on_file_sizes_is_reported_and_nothing_older_is_lost(tmp_path):
    save(tmp_path, 1)
    said = run_child(LIMITED, tmp_path)
    assert said.startswith("CheckpointError writing part-00000-of-00003.safetensors") and "ulimit -f" in said
    assert_only_the_first_is_left(tmp_path)


def test_a_folder_without_permission_to_write_is_reported_and_nothing_older_is_lost(tmp_path):
    save(tmp_path, 1)
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user (root?) may write everywhere; the read-only file system below is for them")
        with pytest.raises(CheckpointError, match="this user may not write there: change the permissions"):
            save(tmp_path, 2)
    finally:
        tmp_path.chmod(0o755)
    assert_only_the_first_is_left(tmp_path)


def test_a_read_only_file_system_is_reported_and_nothing_older_is_lost(tiny_disk):
    save(tiny_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"beginning the checkpoint of step 2 in .* read-only: make it writable"):
        save(tiny_disk, 2)
    assert_only_the_first_is_left(tiny_disk)


def test_a_file_system_that_becomes_read_only_in_the_middle_is_reported(tiny_disk):
    save(tiny_disk, 1)
    partial = begin(tiny_disk, 2)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(CheckpointError, match="read-only"):
        write_part(partial, 0, 1, {"w": torch.ones(3)})
    assert found_step(tiny_disk) == 1


def test_a_run_folder_that_is_a_file_is_reported(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(CheckpointError, match="beginning the checkpoint of step 2"):
        begin(tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match="cannot list the checkpoints"):
        list_checkpoints(tmp_path / "run")


def test_a_task_that_does_not_see_the_folder_is_told_so(tmp_path):
    partial = begin(tmp_path, 2)
    partial.rmdir()
    with pytest.raises(CheckpointError, match="do all ps tasks see the same folder"):
        write_part(partial, 0, 1, {"w": torch.ones(3)})


# Exports load without torchquorum.


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_an_export_loads_without_torchquorum(saved, tmp_path, name, averages):
    target = tmp_path / name
    target.write_text("an older export")
    assert export(saved, target, averages=averages) == target
    loaded = load_file(target) if name.endswith(".safetensors") else torch.load(target, weights_only=True)
    with CheckpointReader(saved) as reader:
        expected = reader.state_dict(averages=averages)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in expected.items())
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_export_to_an_unknown_kind_of_file_is_refused(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"must end in .safetensors or .pt"):
        export(saved, tmp_path / "model.h5")


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_an_export_to_a_full_disk_is_reported_and_keeps_the_older_file(tmp_path, tiny_disk, name):
    path = save(tmp_path / "run", 1, example(1, scale=1000))
    (tiny_disk / name).write_text("an older export")
    with pytest.raises(CheckpointError, match=f"writing .*{name} failed.*the disk is full"):
        export(path, tiny_disk / name)
    assert [file.name for file in tiny_disk.iterdir()] == [name]
    assert (tiny_disk / name).read_text() == "an older export"


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    path = save(tmp_path, 1)
    flip(path / part_name(1, 3), -3)
    with pytest.raises(CheckpointError, match="part-00001-of-00003.safetensors is damaged"):
        export(path, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()
