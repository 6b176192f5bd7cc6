"""The bytes of a file, decompressed if needed: plain, gzip or zlib, in pieces of bounded size.

Used by the reader and the writer of TFRecord files. What always holds: it never holds more in memory than was asked for,
whatever the compression ratio; a damaged or truncated file is an error with its position.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Literal, TypeAlias

from torchquorum.errors import ConfigError, DataError

Compression: TypeAlias = Literal["GZIP", "ZLIB", "none"]
_WINDOW_BITS: dict[str, int] = {"GZIP": zlib.MAX_WBITS + 16, "ZLIB": zlib.MAX_WBITS}
_MEMORY_LEVEL = 9  # TensorFlow's level; zlib's default of 8 gives other bytes
_PACKED_BYTES = 1 << 16


def parse_compression(text: str | None) -> Compression | None:
    """Reads "GZIP", "ZLIB", "" or "none", in any case; returns None for "auto".

    None means "none", as in TensorFlow; callers that want "auto" as default say so.

    Raises:
        ConfigError: It is something else.
    """
    if text is None or (isinstance(text, str) and text.upper() in ("", "NONE")):
        return "none"
    if isinstance(text, str):
        if text.upper() == "AUTO":
            return None
        if text.upper() in ("GZIP", "ZLIB"):
            return "GZIP" if text.upper() == "GZIP" else "ZLIB"
    raise ConfigError(f"compression={text!r}: must be 'GZIP', 'ZLIB', None for none, or 'auto' to detect it")


def looks_packed(head: bytes) -> Compression:
    """Detects the compression from a file's first bytes."""
    if head[:3] == b"\x1f\x8b\x08":
        return "GZIP"
    # zlib: the method is 8 with a window of at most 32 KiB, and both bytes together are a multiple of 31.
    if len(head) >= 2 and head[0] & 15 == 8 and head[0] >> 4 <= 7 and (head[0] << 8 | head[1]) % 31 == 0:
        return "ZLIB"
    return "none"


class PlainSource:
    """An uncompressed file; skipping does not read it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._at = 0

    def size(self) -> int | None:
        """Returns the number of bytes, if known."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, size_bytes: int) -> bytes:
        """Returns at most `size_bytes` bytes; none at the end."""
        data = self._file.read(size_bytes)
        self._at += len(data)
        return data

    def skip(self, size_bytes: int) -> int:
        """Skips bytes; returns how many were skipped."""
        there = min(size_bytes, max(0, os.fstat(self._file.fileno()).st_size - self._at))
        self._at = self._file.seek(there, os.SEEK_CUR)
        return there

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class PackedSource:
    """The contents of a gzip or zlib file; concatenated gzip files are read as one, as gzip does."""

    def __init__(self, path: Path, compression: Compression) -> None:
        self._path, self._kind = path, compression
        self._file = path.open("rb", buffering=0)
        self._read = 0
        self._packed = b""
        self._unpack = zlib.decompressobj(_WINDOW_BITS[compression])
        self._fresh = True  # at the start of a gzip member

    def size(self) -> int | None:
        """Returns None: the size is not known before the end."""
        return None

    def read(self, size_bytes: int) -> bytes:
        """Returns at most `size_bytes` decompressed bytes; none at the end."""
        while True:
            if not self._packed:
                self._packed = self._file.read(_PACKED_BYTES)
                self._read += len(self._packed)
                if not self._packed:
                    if self._fresh:
                        return b""
                    raise DataError(
                        f"{self._path}: the {self._kind} stream ends in the middle, at byte {self._read}; {_AGAIN}"
                    )
            try:
                data = self._unpack.decompress(self._packed, size_bytes)
            except zlib.error as error:
                raise DataError(
                    f"{self._path}: the {self._kind} stream is damaged before byte {self._read}: {error}; {_AGAIN}"
                ) from None
            self._fresh = False
            self._packed = self._unpack.unconsumed_tail
            if self._unpack.eof:
                self._packed = self._unpack.unused_data
                if self._packed and self._kind == "ZLIB":
                    place = self._read - len(self._packed)
                    raise DataError(
                        f"{self._path}: more bytes after the end of the ZLIB stream, from byte {place}; {_AGAIN}"
                    )
                self._unpack = zlib.decompressobj(_WINDOW_BITS[self._kind])
                self._fresh = True
            if data:
                return data

    def skip(self, size_bytes: int) -> int:
        """Skips decompressed bytes; returns how many were skipped."""
        left = size_bytes
        while left and (data := self.read(min(left, 1 << 20))):
            left -= len(data)
        return size_bytes - left

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


Source: TypeAlias = PlainSource | PackedSource
_AGAIN = "copy or write the file again"


def packer(compression: Compression) -> zlib._Compress:
    """Returns a compressor that produces the same bytes as TensorFlow."""
    return zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, _WINDOW_BITS[compression], _MEMORY_LEVEL)
