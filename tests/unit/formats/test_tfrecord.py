import gzip
import os
import pickle
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchquorum as tq
from tests.unit.formats.descriptors import descriptor_of
from torchquorum.errors import ConfigError, DataError, TorchQuorumError
from torchquorum.formats import tfrecord as module
from torchquorum.formats.crc32c import masked_crc32c
from torchquorum.formats.tfrecord import RecordError, RecordReader, read_records
from torchquorum.formats.tfrecord_write import TFRecordWriter, frame

GOLDEN = Path(__file__).parents[2] / "golden"
RECORDS = [b"first", b"", bytes(300), b"x" * 70_000, b"last"] + [b"same"] * 20
in_any_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def header(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", masked_crc32c(packed))


def write(path: Path, records: list[bytes], compression: str | None = None) -> Path:
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)
    return path


def read_until_damage(path: Path, compression: str | None = "auto") -> tuple[list[bytes], str | None]:
    found: list[bytes] = []
    try:
        for record in read_records(path, compression):
            found.append(record)
    except TorchQuorumError as error:
        return found, str(error)
    return found, None


def drain(reader: RecordReader, most: int = 1024) -> list[tuple[bytes, int]]:
    found = []
    while block := reader.read(most):
        found += block
    reader.close()
    return found


@pytest.mark.parametrize(("name", "compression"), [("", None), (".gz", "GZIP"), (".zlib", "ZLIB")])
def test_what_tensorflow_wrote_is_read_and_written_again_byte_for_byte(
    name: str, compression: str | None, tmp_path: Path
) -> None:
    path = GOLDEN / f"tf_mixed.tfrecords{name}"
    records = list(read_records(path))
    assert len(records) == 13
    assert list(read_records(path, compression)) == records
    assert write(tmp_path / "again", records, compression).read_bytes() == path.read_bytes()


def test_the_golden_file_is_read_and_written_again_byte_for_byte(tmp_path: Path) -> None:
    path = GOLDEN / "mnist_200.tfrecords"
    records = list(tq.data.read_records(str(path)))
    assert len(records) == 200 and {len(record) for record in records} == {844}
    assert write(tmp_path / "again", records).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB", "", "none", "gzip", "zlib"])
def test_records_of_all_sizes_come_back(compression: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "file", RECORDS, compression)
    assert list(read_records(path)) == RECORDS
    assert list(read_records(path, compression, verify=False)) == RECORDS


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_a_file_without_records_is_no_error(compression: str | None, tmp_path: Path) -> None:
    assert list(read_records(write(tmp_path / "file", [], compression))) == []


def test_gzip_files_after_one_another_are_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(frame(b"one")) + gzip.compress(frame(b"two")))
    assert list(read_records(path)) == [b"one", b"two"]


def test_a_plain_file_whose_first_length_looks_like_gzip_is_read_as_plain(tmp_path: Path) -> None:
    record = bytes(0x088B1F)
    assert frame(record).startswith(b"\x1f\x8b\x08")
    assert list(read_records(write(tmp_path / "file", [record]))) == [record]


@pytest.mark.parametrize("chunk", [1, 7, 13, 64, 1 << 19])
@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_pieces_of_any_size_give_the_same_records_and_places(
    chunk: int, compression: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [r for r in RECORDS if len(r) < 1000]
    path = write(tmp_path / "file", records, compression)
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(module, "_SKIM_BYTES", chunk)
    found = drain(RecordReader(path, place=1 << 48))
    assert [record for record, _ in found] == records
    places = np.cumsum([0] + [len(record) + 16 for record in records])[:-1]
    assert [place - (1 << 48) for _, place in found] == places.tolist()


@given(
    sizes=st.lists(st.sampled_from([0, 1, 4, 30, 5000]), max_size=40),
    stride=st.integers(1, 7),
    data=st.data(),
)
@in_any_folder
def test_every_nth_record_is_what_a_slice_of_all_of_them_is(
    sizes: list[int], stride: int, data: Any, tmp_path: Path
) -> None:
    records = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    path = write(tmp_path / "file", records)
    phase = data.draw(st.integers(0, stride - 1))
    expected = records[phase::stride]
    reader = RecordReader(path, stride=stride, phase=phase)
    found: list[bytes] = []
    at = 0
    for skip, count in data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=6)):
        skipped = reader.skip(skip)
        assert skipped == min(skip, max(0, len(expected) - at))
        at += skipped
        block = reader.read(count)
        assert [record for record, _ in block] == expected[at : at + len(block)]
        assert block or at == len(expected)
        at += len(block)
    found = [record for record, _ in drain(reader)]
    assert found == expected[at:]
    assert reader.phase == (phase - len(records)) % stride  # what the next file begins with


def assert_damaged(path: Path, good: int, offset: int, message: str) -> None:
    assert len(read_until_damage(path)[0]) == good
    with pytest.raises(RecordError, match=message) as caught:
        list(read_records(path))
    assert (caught.value.path, caught.value.offset, caught.value.record) == (path, offset, good)
    assert f"{path}: record {good}, at byte {offset}: " in str(caught.value)


def with_a_bit_flipped(path: Path, place: int) -> Path:
    body = bytearray(path.read_bytes())
    body[place] ^= 4
    bad = path.with_name("bad")
    bad.write_bytes(body)
    return bad


def test_a_damaged_length_is_named_by_file_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "file", [b"abc", b"defg", b"h"])
    for place in range(19, 31):
        assert_damaged(with_a_bit_flipped(path, place), 1, 19, "the length does not match its checksum")


def test_damaged_data_is_named_by_file_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "file", [b"abc", b"defg", b"h"])
    for place in range(31, 39):
        bad = with_a_bit_flipped(path, place)
        assert_damaged(bad, 1, 19, "the data does not match its checksum")
        assert len(list(read_records(bad, verify=False))) == 3


def test_a_file_cut_off_anywhere_is_named_by_file_and_offset(tmp_path: Path) -> None:
    records = [b"abc", b"defg", b"h"]
    whole = write(tmp_path / "file", records).read_bytes()
    starts = [0, 19, 39, len(whole)]
    for size in range(len(whole) + 1):
        path = tmp_path / "cut"
        path.write_bytes(whole[:size])
        good = sum(start <= size for start in starts[1:])
        if size in starts:
            assert list(read_records(path)) == records[:good]
            continue
        part = "in the record's length" if size - starts[good] < 12 else "in the record's data"
        assert_damaged(path, good, starts[good], part)
        reader = RecordReader(path)
        with pytest.raises(RecordError, match=part):
            reader.skip(10)
        reader.close()


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**31, 2**40])
@pytest.mark.parametrize("packed", [False, True])
def test_a_length_that_cannot_be_true_costs_no_memory(length: int, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    body = frame(b"good") + header(length) + b"data"
    path.write_bytes(gzip.compress(body) if packed else body)
    tracemalloc.start()
    with pytest.raises(RecordError, match="a length of|the file ends in the record's data"):
        list(read_records(path))
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()


@pytest.mark.parametrize("packed", [False, True])
def test_a_length_beyond_the_end_costs_no_memory(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    body = frame(b"good") + header(2**31 - 1) + bytes(1000)
    path.write_bytes(zlib.compress(body) if packed else body)
    tracemalloc.start()
    with pytest.raises(RecordError, match="2,147,483,663 bytes are expected, 1,012 exist"):
        list(read_records(path))
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()


def test_a_well_packed_file_is_not_unpacked_all_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "file", [bytes(10_000)] * 3_000, "GZIP")
    assert path.stat().st_size < 400_000
    tracemalloc.start()
    assert sum(1 for _ in read_records(path)) == 3_000
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_a_packed_file_that_is_cut_off_or_damaged_is_named(compression: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = write(tmp_path / "file", [rng.bytes(1000) for _ in range(50)], compression).read_bytes()
    path = tmp_path / "bad"
    for size in (3, 10, 1000, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"{path}: the {compression} stream ends in the middle, at byte {size}"):
            list(read_records(path, compression))
    body = bytearray(whole)
    body[2000] ^= 255
    path.write_bytes(body)
    with pytest.raises(DataError, match=str(path)):
        list(read_records(path, compression))
    path.write_bytes(whole + b"more")
    with pytest.raises(DataError, match=f"{path}"):
        list(read_records(path, compression))


def test_a_packed_file_read_as_another_kind_says_what_may_be_wrong(tmp_path: Path) -> None:
    path = write(tmp_path / "file", [b"abc"], "GZIP")
    with pytest.raises(RecordError, match="is this a TFRecord file with this compression"):
        list(read_records(path, None))
    with pytest.raises(DataError, match="the ZLIB stream is damaged"):
        list(read_records(path, "ZLIB"))


@given(body=st.binary(max_size=200), compression=st.sampled_from(["auto", None, "GZIP", "ZLIB"]))
@in_any_folder
def test_arbitrary_bytes_give_records_or_an_error_that_names_the_file(
    body: bytes, compression: Any, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(body)
    _, error = read_until_damage(path, compression)
    assert error is None or (str(path) in error and "byte" in error)


@given(data=st.data(), compression=st.sampled_from([None, "GZIP", "ZLIB"]))
@settings(in_any_folder, max_examples=200)
def test_a_file_changed_anywhere_gives_true_records_and_then_an_error(
    data: Any, compression: Any, tmp_path: Path
) -> None:
    records = [b"abc", b"", b"x" * 300, b"same", b"same", b"same", b"same", b"same", b"end"]
    body = bytearray(write(tmp_path / "file", records, compression).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "bad"
    path.write_bytes(body[: data.draw(st.integers(0, len(body)))])
    found, error = read_until_damage(path, compression)
    assert error is None or (str(path) in error and "byte" in error)
    assert found == records[: len(found)]


def test_a_record_error_survives_the_way_between_processes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not a record")
    with pytest.raises(RecordError) as caught:
        list(read_records(tmp_path / "file"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path, again.offset) == (str(caught.value), tmp_path / "file", 0)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: it cannot be read: No such file"):
        list(read_records(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="it cannot be read: Is a directory"):
        list(read_records(tmp_path))
    with pytest.raises(ConfigError, match="compression='lzma': must be 'GZIP', 'ZLIB'"):
        list(read_records(tmp_path, "lzma"))
    with pytest.raises(ConfigError, match="compression=5: must be 'GZIP', 'ZLIB'"):
        list(read_records(tmp_path, 5))  # pyright: ignore[reportArgumentType]


def test_after_damage_nothing_more_is_read_or_passed_over(tmp_path: Path) -> None:
    whole = frame(b"first") + frame(b"second") + frame(b"third")
    damaged = bytearray(whole)
    damaged[len(frame(b"first"))] ^= 1  # the second one's length
    (tmp_path / "file").write_bytes(damaged)
    for ways in ("read", "skip"), ("skip", "read"), ("skip", "skip"), ("read", "read"):
        reader = RecordReader(tmp_path / "file")
        assert reader.read(1) == [(b"first", 0)]
        for way in ways:
            with pytest.raises(RecordError, match="record 1, at byte 21: the length does not match its checksum"):
                getattr(reader, way)(1)
        reader.close()


def test_data_that_was_found_damaged_is_not_passed_over_later(tmp_path: Path) -> None:
    damaged = bytearray(frame(b"first") + frame(b"second") + frame(b"third"))
    damaged[-1] ^= 1
    (tmp_path / "file").write_bytes(damaged)
    reader = RecordReader(tmp_path / "file")
    assert [record for record, _ in reader.read()] == [b"first", b"second"]
    with pytest.raises(RecordError, match="record 2, at byte 43: the data does not match its checksum"):
        reader.skip(1)
    reader.close()


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_records_longer_than_what_is_read_at_once_are_passed_over(compression: str | None, tmp_path: Path) -> None:
    records = [b"a" * 3_000_000, b"b", b"c" * 2_000_000, b"d"]
    reader = RecordReader(write(tmp_path / "file", records, compression))
    assert reader.skip(1) == 1 and reader.read(1)[0][0] == b"b"
    assert reader.skip(1) == 1 and reader.skip(0) == 0 and reader.read(1)[0][0] == b"d"
    assert reader.skip(5) == 0 and reader.read() == []
    reader.close()


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_a_record_that_ends_too_early_is_not_passed_over(compression: str | None, tmp_path: Path) -> None:
    body = frame(b"one") + frame(b"x" * 3_000_000)[:2_000_000]
    (tmp_path / "file").write_bytes(gzip.compress(body) if compression else body)
    reader = RecordReader(tmp_path / "file", compression)
    with pytest.raises(
        RecordError, match="the file ends in the record's data: 3,000,016 bytes are expected, 2,000,000"
    ):
        reader.skip(2)
    reader.close()


def test_records_of_thousands_of_lengths_come_back(tmp_path: Path) -> None:
    records = [bytes(length) for length in range(5000)]  # more than the reader remembers
    assert list(read_records(write(tmp_path / "file", records))) == records


def test_a_disk_that_fails_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "file", [bytes(3_000_000)] * 2)
    reader = RecordReader(path)
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, descriptor_of(path))  # from now on the system refuses to read it
    os.close(folder)
    with pytest.raises(DataError, match="file: it cannot be read: Is a directory"):
        reader.read()
    reader.close()
