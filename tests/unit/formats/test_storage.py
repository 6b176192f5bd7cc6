"""Run folders on addresses of fsspec: in memory, and on a real server that speaks S3."""

import datetime
import errno
import secrets
import stat
import sys
import time
from pathlib import Path

import pytest
import torch

import torchquorum as tq
from tests.s3 import s3_server
from tests.unit.formats.checkpoints import example, left_by_the_dead, save
from torchquorum.errors import ConfigError
from torchquorum.formats import ledger_segments as segments
from torchquorum.formats.checkpoint import CheckpointError, CheckpointReader, list_checkpoints, newest_good, verify
from torchquorum.formats.checkpoint_manifest import MANIFEST
from torchquorum.formats.checkpoint_names import this_host
from torchquorum.formats.checkpoint_write import begin, export, prune, write_part
from torchquorum.formats.ledger import NAME, Event, read_records
from torchquorum.formats.ledger_segments import fetch_run
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.formats.measures import Measure, append_measures, read_measures
from torchquorum.formats.scratch import scratch_folder
from torchquorum.formats.storage import RemotePath, absolute, check_writable, is_there, locate, write_whole
from torchquorum.report.history import read_history

pytestmark = pytest.mark.library_keeps_sockets


class Killed(BaseException):
    """The process is gone: nothing more of it happens."""


@pytest.fixture(scope="module")
def server():
    with s3_server() as variables:
        yield variables


@pytest.fixture(params=["memory", "s3"])
def folder(request, monkeypatch) -> RemotePath:
    if request.param == "s3":
        for name, value in request.getfixturevalue("server").items():
            monkeypatch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
    found = locate(f"{request.param}://bucket/{secrets.token_hex(4)}")
    assert isinstance(found, RemotePath)
    return found


class TestAddresses:
    def test_paths_and_file_addresses_are_paths(self):
        assert locate("runs/a") == Path("runs/a")
        assert locate("file:///tmp/a") == Path("/tmp/a")
        assert absolute("runs/a") == str(Path("runs/a").absolute())
        assert locate("C:/x") == Path("C:/x")

    def test_others_keep_their_address_and_know_their_parts(self):
        run = locate("memory://bucket/run1/")
        assert isinstance(run, RemotePath)
        assert str(run) == absolute("memory://bucket/run1/") == "memory://bucket/run1"
        assert (run / "a.txt").suffix == ".txt" and (run / "a").parent == run and run.name == "run1"
        assert locate(str(run / "a")) == run / "a"

    def test_a_path_that_lost_a_slash_of_its_address_is_mended(self):
        assert locate(Path("memory://bucket/run1")) == locate("memory://bucket/run1")

    @pytest.mark.parametrize(
        ("address", "message"),
        [
            ("foo://a/b", "unknown kind of address"),
            ("s3://", "must name a folder, such as s3://bucket/run1"),
            ("s3:///", "must name a folder"),
        ],
    )
    def test_what_nobody_knows_is_refused(self, address, message):
        with pytest.raises(ConfigError, match=message):
            locate(address)

    def test_a_missing_driver_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "gcsfs", None)
        with pytest.raises(ConfigError, match=r"pip install 'torchquorum\[gs\]'"):
            locate("gs://bucket/run1")

    def test_addresses_are_values(self):
        first, second = locate("memory://bucket/a"), locate("memory://bucket/b")
        assert locate(first) is first and {first, locate("memory://bucket/a")} == {first} != {second}
        assert sorted([second, first]) == [first, second] and first != "memory://bucket/a"  # type: ignore[type-var]
        assert repr(first) == "RemotePath('memory://bucket/a')"


class Driver:
    """A file system of a stranger's, which says of itself what it was given, or fails with it."""

    def __init__(self, says):
        self.says = says

    def info(self, path, **_):
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    exists = isdir = isfile = ls = info

    def pipe_file(self, path, data):
        self.info(path)


class TestDrivers:
    @pytest.mark.parametrize(
        ("error", "kind", "number", "text"),
        [
            (PermissionError("Access Denied"), PermissionError, errno.EACCES, "PermissionError: Access Denied"),
            (OSError(errno.ENOSPC, "no more"), OSError, errno.ENOSPC, "OSError: no more"),
            (TimeoutError("slow"), OSError, errno.EIO, "TimeoutError: slow"),
            (KeyError("region"), OSError, errno.EIO, "KeyError: 'region'"),
            (FileNotFoundError("x"), FileNotFoundError, errno.ENOENT, "no such object"),
            (FileNotFoundError("no such bucket"), FileNotFoundError, errno.ENOENT, "no such bucket"),
        ],
        ids=repr,
    )
    def test_whatever_a_driver_says_becomes_an_error_of_the_system_with_its_address(self, error, kind, number, text):
        place = RemotePath(Driver(error), "bucket/run", "strange")
        for act in (place.stat, place.exists, place.iterdir, lambda: place.write_bytes(b"x")):
            with pytest.raises(kind) as caught:
                act()
            assert (caught.value.errno, caught.value.strerror) == (number, text)
            assert caught.value.filename == "strange://bucket/run"

    def test_a_place_that_cannot_be_reached_is_an_error_of_the_users_settings(self):
        place = RemotePath(Driver(OSError(errno.EIO, "refused")), "bucket/run", "strange")
        with pytest.raises(
            ConfigError, match=r"strange://bucket/run cannot be read: OSError: refused; check the address"
        ):
            is_there(place)
        with pytest.raises(ConfigError, match=r"cannot be written to: OSError: refused; check that the bucket exists"):
            check_writable(place)
        with pytest.raises(
            CheckpointError, match="cannot list the checkpoints in strange://bucket/run: OSError: refused"
        ):
            list_checkpoints(place)

    def test_the_time_of_the_last_change_is_found_in_the_words_of_each_driver(self):
        at = datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)
        for info in ({"LastModified": at}, {"mtime": at.timestamp()}, {"updated": "soon", "created": at}):
            found = RemotePath(Driver({"size": 5, **info}), "bucket/a", "strange").stat()
            assert (found.st_mtime, found.st_size, stat.S_ISREG(found.st_mode)) == (at.timestamp(), 5, True)
        unknown = RemotePath(Driver({"type": "directory"}), "bucket/a", "strange").stat()
        assert abs(unknown.st_mtime - time.time()) < 600 and stat.S_ISDIR(unknown.st_mode)


class TestFilesOfThisHost:
    def test_a_text_appears_whole_or_not_at_all(self, tmp_path):
        target = tmp_path / "new" / "report.json"
        write_whole(target, "{}")
        write_whole(target, "[]")
        assert [p.name for p in target.parent.iterdir()] == ["report.json"] and target.read_text() == "[]"
        (tmp_path / "taken").mkdir()
        with pytest.raises(IsADirectoryError):
            write_whole(tmp_path / "taken", "{}")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "taken"]

    def test_a_folder_of_this_host_is_tried_when_it_is_written_to(self, tmp_path):
        check_writable(tmp_path / "not yet")
        assert is_there(tmp_path) and not is_there(tmp_path / "not yet") and not (tmp_path / "not yet").exists()


class TestCheckpoints:
    def test_what_was_saved_comes_back_and_the_oldest_go(self, folder):
        for step in (1, 2, 3):
            path = save(folder, step)
        assert isinstance(path, RemotePath) and path == folder / "model.ckpt-3"
        prune(folder, keep=2)
        assert [info.step for info in list_checkpoints(folder)] == [2, 3]
        assert verify(path) is None
        with CheckpointReader(path) as reader:
            for (kind, variable, state), tensor in example(3).items():
                assert torch.equal(reader.read(kind, variable, state), tensor.reshape(-1))
        gone = folder / "model.ckpt-1"
        assert not gone.exists() or not list(gone.iterdir())  # memory:// remembers empty folders

    def test_what_a_killed_writer_left_on_this_host_goes_with_the_next_part(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with scratch_folder() as living:
            left = left_by_the_dead(living)
            save(folder, 1, num_ps=2)
            assert living.is_dir() and not left.exists()
        assert list(tmp_path.iterdir()) == []

    def test_a_writer_killed_before_any_of_its_puts_leaves_the_old_checkpoint_or_the_new_one(self, folder, monkeypatch):
        save(folder, 1, num_ps=2)
        put, write = RemotePath.put, RemotePath.write_bytes
        for last in range(4):
            done = [0]

            def counted(original, done=done, last=last):
                def call(self, given):
                    if done[0] == last:
                        raise Killed
                    done[0] += 1
                    return original(self, given)

                return call

            def dead(self, **_):
                raise OSError(errno.EIO, "a dead process removes nothing")

            with monkeypatch.context() as patch:
                patch.setattr(RemotePath, "put", counted(put))
                patch.setattr(RemotePath, "write_bytes", counted(write))
                patch.setattr(RemotePath, "unlink", dead)
                try:
                    save(folder, 2, num_ps=2)
                except Killed:
                    assert last < 3  # two parts and a manifest
            found, skipped = newest_good(folder)
            assert found is not None and not skipped
            assert found[1].step == (2 if last == 3 else 1)
            assert [info.problem for info in list_checkpoints(folder)] == [None] * found[1].step

    def test_parts_of_a_dead_writer_go_and_those_of_a_living_one_stay(self, folder):
        save(folder, 1)
        ours, theirs = begin(folder, 2), folder / f".model.ckpt-2.partial-{this_host()}-4194300-00ff00ff"
        elsewhere = folder / ".model.ckpt-3.partial-0123456789ab-1-00ff00ff"
        for partial in (ours, theirs, elsewhere):
            write_part(partial, 0, 1, {"x": torch.ones(3)})
        removed = prune(folder)
        assert [path.name for path in removed] == [f"part-00000-of-00001.{this_host()}-4194300-00ff00ff.safetensors"]
        assert len(list((folder / "model.ckpt-2").iterdir())) == 1  # ours; the one from elsewhere may be alive, too
        assert [info.step for info in list_checkpoints(folder)] == [1]

    def test_a_damaged_checkpoint_keeps_its_parts_until_its_time_has_come(self, folder):
        path = save(folder, 2)
        (path / MANIFEST).write_bytes(b"{")
        write_part(folder / f".model.ckpt-2.partial-{this_host()}-4194300-00ff00ff", 0, 1, {"x": torch.ones(3)})
        before = sorted(entry.name for entry in path.iterdir())
        assert prune(folder) == [] and sorted(entry.name for entry in path.iterdir()) == before

    def test_a_second_one_of_the_same_step_takes_over_with_its_manifest(self, folder):
        path = save(folder, 5, example(1))
        with CheckpointReader(path) as old:
            assert save(folder, 5, example(2)) == path
            assert torch.equal(old.read("variable", "count"), example(1)["variable", "count", ""].reshape(1))
        with CheckpointReader(path) as new:
            assert torch.equal(new.read("variable", "count"), example(2)["variable", "count", ""].reshape(1))

    def test_a_damaged_part_is_passed_over(self, folder):
        save(folder, 1)
        path = save(folder, 2)
        part = next(entry for entry in path.iterdir() if entry.suffix == ".safetensors")
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(bytes(data))
        found, skipped = newest_good(folder)
        assert found is not None and found[1].step == 1
        assert "is damaged: its checksum" in (skipped[0].problem or "")
        part.unlink()
        assert "is missing" in (newest_good(folder)[1][0].problem or "")

    def test_a_state_dict_is_exported_from_it_and_to_it(self, folder, tmp_path):
        path = save(folder, 1)
        local = export(path, tmp_path / "m.safetensors")
        remote = export(path, folder / "m.safetensors")
        assert isinstance(local, Path) and isinstance(remote, RemotePath)
        assert local.read_bytes() == remote.read_bytes()

    def test_a_damaged_one_of_the_same_step_is_moved_aside_and_not_written_over(self, folder):
        path = save(folder, 4)
        part = next(entry for entry in path.iterdir() if entry.name.startswith("part-00000"))
        part.write_bytes(part.read_bytes()[:-1] + b"?")
        damaged = part.read_bytes()
        save(folder, 4)
        found, skipped = newest_good(folder)
        assert found is not None and skipped == []
        kept = next(e for e in (folder / "model.ckpt-4.damaged").iterdir() if e.name.startswith("part-00000"))
        assert kept.read_bytes() == damaged


class TestFilesThatGrow:
    def test_segments_are_put_while_the_run_goes_on_and_are_one_ledger_in_the_end(self, folder, monkeypatch, tmp_path):
        monkeypatch.setattr(segments, "SEGMENT_BYTES", 200)
        monkeypatch.setattr(segments, "PUT_EVERY_S", 0.01)
        written = 0
        for life in (1, 2):
            ledger = LedgerWriter(folder, pytest.fail)
            deadline = time.monotonic() + 100
            while self.count(folder) < 2 * life - 1 and time.monotonic() < deadline:
                for _ in range(5):
                    ledger.write(Event("saved", 1.0, written))
                    written += 1
                ledger.flush()
                time.sleep(0.01)
            ledger.write(Event("ended", 1.0, written))
            written += 1
            ledger.close()
        assert self.count(folder) >= 3
        fetch_run(folder, tmp_path, (NAME,))
        assert [record.version for record in read_records(tmp_path)] == list(range(written))

    @staticmethod
    def count(folder: RemotePath) -> int:
        try:
            return sum(segments.is_segment(entry.name, NAME) for entry in folder.iterdir())
        except FileNotFoundError:
            return 0

    def test_a_store_that_fails_is_said_once_and_not_the_end_of_the_run(self, folder, monkeypatch):
        def fail(self, data):
            raise OSError(errno.EIO, "no way")

        said: list[str] = []
        monkeypatch.setattr(segments, "PUT_EVERY_S", 0.01)
        ledger = LedgerWriter(folder, said.append)
        with monkeypatch.context() as patch:
            patch.setattr(RemotePath, "write_bytes", fail)
            deadline = time.monotonic() + 60
            while not said and time.monotonic() < deadline:
                ledger.write(Event("saved", 1.0, 1))
                ledger.flush()
                time.sleep(0.01)
        assert len(said) == 1 and "cannot be written (no way); training goes on" in said[0]
        ledger.close()

    def test_measures_and_texts_are_objects_of_their_own(self, folder, tmp_path):
        for step in (1, 2):
            append_measures(folder, [Measure("accuracy", 0.5, step, 1.0)])
        write_whole(folder / "report.json", "{}")
        fetch_run(folder, tmp_path, ("measures.jsonl", NAME))
        fetch_run(folder, tmp_path, ("measures.jsonl", NAME))  # what is here already stays
        assert not (tmp_path / NAME).exists() and (folder / "report.json").read_text() == "{}"
        assert [m.global_step for m in read_measures(tmp_path)] == [1, 2]
        assert (tmp_path / "report.json").read_text() == "{}"


def train(folder: RemotePath, last_step: int) -> tuple[int, float]:
    task = tq.join(argv=[])
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    summaries = tq.SummaryHook(every_steps=1, histograms=False)
    with tq.Session(task, model, optimizer, logdir=str(folder), last_step=last_step, hooks=[summaries]) as session:
        began = session.global_step
        while not session.should_stop():
            model.weight.grad = -torch.ones_like(model.weight)
            optimizer.step(loss=1.0)
            session.measure(accuracy=0.1)
    return began, model.weight.item()


def test_a_program_alone_keeps_its_whole_run_there_and_goes_on_from_it(folder):
    assert train(folder, 3) == (0, 3.0)
    assert train(folder, 5) == (3, 5.0)
    history = read_history(folder)
    assert history.last_version == 5 and len(history.at) == 5 and history.restarts == 1
    assert [c.step for c in history.checkpoints] == [3, 5]
    assert any(".tfevents." in entry.name for entry in folder.iterdir())


def test_the_memory_of_one_process_is_refused_where_there_are_several():
    task = tq.join(
        argv=["--job_name=worker", "--task_id=0", "--ps_hosts=localhost:1", "--worker_hosts=localhost:2,localhost:3"]
    )
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="memory:// is the memory of one process, and this run has 1 ps and 2 worker"):
        tq.Session(task, model, tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0)), logdir="memory://x")


def test_a_bucket_that_is_not_there_is_an_error_at_the_start(server, monkeypatch):
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match="s3://nowhere/run cannot be written to: .*bucket does not exist"):
        train(locate("s3://nowhere/run"), 3)  # pyright: ignore[reportArgumentType]
