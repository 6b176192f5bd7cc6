import os
import resource
from pathlib import Path
from typing import Any

import pytest

import torchquorum as tq
from tests.unit.formats.descriptors import descriptor_of
from torchquorum.errors import ConfigError, DataError
from torchquorum.formats import tfrecord_write
from torchquorum.formats.tfrecord import read_records
from torchquorum.formats.tfrecord_write import TFRecordWriter


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_appears_whole_when_the_writer_is_closed(tmp_path: Path) -> None:
    writer = tq.data.TFRecordWriter(tmp_path / "file")
    writer.write(b"one")
    writer.write(tq.data.Example({"a": 1}))
    writer.flush()
    assert not (tmp_path / "file").exists() and len(names(tmp_path)) == 1
    writer.close()
    writer.close()
    assert names(tmp_path) == ["file"]
    assert list(read_records(tmp_path / "file")) == [b"one", tq.data.Example({"a": 1}).SerializeToString()]
    assert writer.records == 2


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")

    def write_some() -> None:
        with TFRecordWriter(tmp_path / "file") as writer:
            writer.write(b"one")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_some()
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"before"
    with TFRecordWriter(tmp_path / "file") as writer:
        writer.write(b"one")
    assert list(read_records(tmp_path / "file")) == [b"one"]


def test_a_writer_that_is_never_closed_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    writer = TFRecordWriter(tmp_path / "file")
    writer.write(b"one")
    with pytest.warns(RuntimeWarning, match="file: its writer was not closed"):
        del writer
    assert names(tmp_path) == []


def test_a_finished_file_has_no_name_until_it_is_published(tmp_path: Path) -> None:
    writer = TFRecordWriter(tmp_path / "file", "GZIP")
    writer.write(b"one")
    writer.finish()
    assert not (tmp_path / "file").exists()
    with pytest.raises(ConfigError, match="the writer is closed"):
        writer.write(b"two")
    writer.publish()
    assert list(read_records(tmp_path / "file")) == [b"one"]


@pytest.mark.parametrize("record", ["text", None, 5, ["a"]])
def test_only_bytes_and_examples_are_records(record: Any, tmp_path: Path) -> None:
    with (
        TFRecordWriter(tmp_path / "file") as writer,
        pytest.raises(ConfigError, match="a record must be bytes or an Example"),
    ):
        writer.write(record)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it cannot be written: No such file or directory"):
        TFRecordWriter(tmp_path / "nowhere" / "file")
    with pytest.raises(ConfigError, match="is not a regular file"):
        TFRecordWriter(tmp_path)
    with pytest.raises(ConfigError, match="is not a regular file"):
        TFRecordWriter("/dev/null")
    with pytest.raises(ConfigError, match="compression='auto'"):
        TFRecordWriter(tmp_path / "file", "auto")
    with pytest.raises(ConfigError, match="compression='bz2'"):
        TFRecordWriter(tmp_path / "file", "bz2")
    assert names(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    writer = TFRecordWriter(tmp_path / "file")
    (partial,) = tmp_path.iterdir()
    with Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), descriptor_of(partial))
        with pytest.raises(DataError, match="file: it cannot be written: No space left on device"):
            writer.write(b"x" * 1_000_000)
    assert names(tmp_path) == []


def test_anything_that_holds_bytes_is_a_record_and_one_that_protobuf_could_not_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfrecord_write, "MAX_RECORD_BYTES", 5)
    with TFRecordWriter(tmp_path / "file") as writer:
        writer.write(bytearray(b"one"))  # pyright: ignore[reportArgumentType]
        writer.write(memoryview(b"three"))  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigError, match="file: a record of 6 bytes; at most 5 are allowed"):
            writer.write(b"twelve")
    assert list(read_records(tmp_path / "file")) == [b"one", b"three"]


@pytest.mark.parametrize("step", ["flush", "finish", "close"])
def test_a_disk_that_is_full_only_when_the_buffer_is_emptied_is_said_and_leaves_nothing(
    tmp_path: Path, step: str
) -> None:
    (tmp_path / "file").write_bytes(b"before")
    writer = TFRecordWriter(tmp_path / "file")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        writer.write(b"x" * 1000)
        with pytest.raises(DataError, match="file: it cannot be written: File too large; check the folder"):
            getattr(writer, step)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"before"
    writer.discard()
    writer.flush()
    with pytest.raises(ConfigError, match="the writer is closed"):
        writer.write(b"more")


def test_a_name_that_was_taken_by_a_folder_meanwhile_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    writer = TFRecordWriter(tmp_path / "file")
    writer.write(b"one")
    (tmp_path / "file" / "inside").mkdir(parents=True)
    with pytest.raises(DataError, match="file: it cannot be written: Is a directory"):
        writer.close()
    assert names(tmp_path) == ["file"]
