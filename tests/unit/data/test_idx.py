"""read_idx: what it reads, and what it says about files it cannot read."""

import gzip
import struct
import warnings
from pathlib import Path

import pytest
import torch

from torchquorum.data.idx import read_idx
from torchquorum.errors import DataError


def idx_bytes(shape: tuple[int, ...], values: bytes, value_type: int = 0x08) -> bytes:
    return bytes([0, 0, value_type, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


@pytest.fixture
def whole() -> bytes:
    return idx_bytes((2, 3, 4), bytes(range(24)))


def write(folder: Path, content: bytes, name: str = "digits") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_plain_file_gives_its_values_in_its_shape(tmp_path: Path, whole: bytes) -> None:
    values = read_idx(write(tmp_path, whole))
    assert values.dtype == torch.uint8
    assert torch.equal(values, torch.arange(24, dtype=torch.uint8).view(2, 3, 4))


@pytest.mark.parametrize("name", ["digits", "digits.gz", "digits.txt"])
@pytest.mark.parametrize("packed", [True, False])
def test_the_first_bytes_tell_gzip_from_plain_whatever_the_name(
    tmp_path: Path, whole: bytes, name: str, packed: bool
) -> None:
    path = write(tmp_path, gzip.compress(whole) if packed else whole, name)
    assert torch.equal(read_idx(path, ndim=3), torch.arange(24, dtype=torch.uint8).view(2, 3, 4))


def test_a_path_may_be_a_string(tmp_path: Path, whole: bytes) -> None:
    assert read_idx(str(write(tmp_path, whole))).shape == (2, 3, 4)


def test_the_tensor_may_be_written_without_a_warning(tmp_path: Path, whole: bytes) -> None:
    path = write(tmp_path, whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = read_idx(path)
    values.zero_()
    assert read_idx(path).sum() > 0


def test_a_file_without_rows_is_an_empty_tensor(tmp_path: Path) -> None:
    assert read_idx(write(tmp_path, idx_bytes((0, 28, 28), b""))).shape == (0, 28, 28)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: cannot be read: No such file.*expected an idx file"):
        read_idx(tmp_path / "nowhere")


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"digits: is empty, expected the magic bytes 00 00 08"):
        read_idx(write(tmp_path, b""))


@pytest.mark.parametrize("content", [b"<html>not found</html>", b"\0\0", b"\0\0\x07\x01\0\0\0\0", b"\0\0\x08\0"])
def test_another_format_shows_the_bytes_found_and_expected(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=rf"digits: starts with {content[:4].hex(' ')}, expected .* 00 00 08 03"):
        read_idx(write(tmp_path, content), ndim=3)


@pytest.mark.parametrize(("value_type", "name"), [(0x09, "int8"), (0x0D, "float32"), (0x0E, "float64")])
def test_another_value_type_is_named(tmp_path: Path, value_type: int, name: str) -> None:
    with pytest.raises(DataError, match=rf"holds {name} values .*expected uint8"):
        read_idx(write(tmp_path, idx_bytes((1,), bytes(8), value_type)))


def test_another_number_of_dimensions_hints_at_swapped_files(tmp_path: Path, whole: bytes) -> None:
    with pytest.raises(DataError, match=r"3 dimensions, expected 1.*swapped"):
        read_idx(write(tmp_path, whole), ndim=1)


def test_a_header_cut_off_is_told(tmp_path: Path, whole: bytes) -> None:
    with pytest.raises(DataError, match=r"9 bytes .*expected 16 or more"):
        read_idx(write(tmp_path, whole[:9]))


@pytest.mark.parametrize("packed", [True, False])
def test_values_cut_off_are_told_with_both_lengths(tmp_path: Path, whole: bytes, packed: bool) -> None:
    content = gzip.compress(whole[:-5]) if packed else whole[:-5]
    with pytest.raises(DataError, match=r"35 bytes .*expected 40.*2 x 3 x 4.*cut off"):
        read_idx(write(tmp_path, content))


def test_bytes_after_the_values_are_told(tmp_path: Path, whole: bytes) -> None:
    with pytest.raises(DataError, match=r"41 bytes .*expected 40.*too long"):
        read_idx(write(tmp_path, whole + b"x"))


def test_a_header_that_claims_more_than_memory_is_refused_without_reserving_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cut off"):
        read_idx(write(tmp_path, idx_bytes((2**32 - 1, 2**32 - 1), b"few")))


def test_every_damage_to_a_gzip_file_is_a_data_error(tmp_path: Path, whole: bytes) -> None:
    packed = gzip.compress(whole)
    flipped = bytearray(packed)
    flipped[-6] ^= 0xFF  # in the checksum
    noise = packed[:10] + b"\xff" * 20
    for damaged in (packed[:3], packed[:-4], packed[: len(packed) // 2], bytes(flipped), noise):
        with pytest.raises(DataError, match=r"digits: starts as a gzip file but cannot be uncompressed"):
            read_idx(write(tmp_path, damaged))
