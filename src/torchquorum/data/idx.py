"""Reads idx files, the format of MNIST: a magic number, the dimensions, then the values.

Owns the format, not the meaning of the numbers. Called by `torchquorum.data.mnist`. What always holds: a returned tensor has
exactly the dimensions that its file declares; anything else is a `DataError` that names the file.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch

from torchquorum.errors import DataError
from torchquorum.lines import counted

_GZIP_MAGIC = b"\x1f\x8b"
_UINT8 = 0x08
_TYPE_NAMES = {_UINT8: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def read_idx(path: str | Path, *, ndim: int | None = None) -> torch.Tensor:
    """Reads one idx file of unsigned bytes, plain or gzip, as its first bytes show.

    Args:
        path: The file.
        ndim: The number of dimensions that the file must have; None for any.

    Returns:
        A new writable torch.uint8 tensor, shaped as the file declares.

    Raises:
        DataError: The file cannot be read, is damaged, or is not an idx file of unsigned bytes with `ndim` dimensions.
    """
    path = Path(path)
    content = _read_bytes(path)
    shape = _parse_header(path, content, ndim)
    header_bytes = 4 + 4 * len(shape)
    expected_bytes = header_bytes + math.prod(shape)
    if len(content) != expected_bytes:
        what = "cut off" if len(content) < expected_bytes else "too long"
        raise DataError(
            f"{path}: {len(content):,} bytes (uncompressed), expected {expected_bytes:,}: its header declares "
            f"{_format_shape(shape)} values. The file is {what}; download it again"
        )
    if expected_bytes == header_bytes:  # torch.frombuffer refuses an empty range
        return torch.empty(shape, dtype=torch.uint8)
    # A bytearray: a tensor over immutable bytes would allow writes to them.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header_bytes).view(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; expected an idx file") from error
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: starts as a gzip file but cannot be uncompressed: {error}; the file is damaged. Download it again"
        ) from error


def _parse_header(path: Path, content: bytes, ndim: int | None) -> tuple[int, ...]:
    expected = f"the magic bytes 00 00 08 {'and a number of dimensions' if ndim is None else f'{ndim:02x}'}"
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPE_NAMES or content[3] == 0:
        found = f"starts with {content[:4].hex(' ')}" if content else "is empty"
        raise DataError(f"{path}: {found}, expected {expected}: this is not an idx file")
    if content[2] != _UINT8:
        raise DataError(
            f"{path}: holds {_TYPE_NAMES[content[2]]} values (type {content[2]:#04x}), expected uint8 (type 0x08)"
        )
    found_ndim = content[3]
    if ndim is not None and found_ndim != ndim:
        raise DataError(
            f"{path}: an idx file with {counted(found_ndim, 'dimension')}, expected {ndim}. Images have 3 and labels 1: "
            "were two files swapped?"
        )
    if len(content) < 4 + 4 * found_ndim:
        raise DataError(
            f"{path}: {len(content)} bytes (uncompressed), expected {4 + 4 * found_ndim} or more for the header of "
            f"{counted(found_ndim, 'dimension')}. The file is cut off; download it again"
        )
    return struct.unpack_from(f">{found_ndim}I", content, 4)


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
