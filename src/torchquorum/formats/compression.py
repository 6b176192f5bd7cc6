"""The bytes of a file, unpacked where it is packed: plain, gzip or zlib, in pieces of bounded size.

Called by the reader and the writer of TFRecord files. What always holds: no more is held in memory than was asked for,
however well the file was packed; a packed file that is damaged or cut off says so with the place in the file.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Literal, TypeAlias

from torchquorum.errors import ConfigError, DataError

Compression: TypeAlias = Literal["GZIP", "ZLIB", "none"]
_WINDOW_BITS: dict[str, int] = {"GZIP": zlib.MAX_WBITS + 16, "ZLIB": zlib.MAX_WBITS}
_MEMORY_LEVEL = 9  # TensorFlow's; zlib's own default is 8, and packs to other bytes
_PACKED_BYTES = 1 << 16


def parse_compression(text: str | None) -> Compression | None:
    """Returns what "GZIP", "ZLIB", "" or "none" mean, in capitals or not; None for "auto".

    None itself is "none", as in TensorFlow, so it is for callers to have "auto" as their default.

    Raises:
        ConfigError: The text is something else.
    """
    if text is None or (isinstance(text, str) and text.upper() in ("", "NONE")):
        return "none"
    if isinstance(text, str):
        if text.upper() == "AUTO":
            return None
        if text.upper() in ("GZIP", "ZLIB"):
            return "GZIP" if text.upper() == "GZIP" else "ZLIB"
    raise ConfigError(f"compression={text!r}: must be 'GZIP', 'ZLIB', None for none, or 'auto' to look at the file")


def looks_packed(head: bytes) -> Compression:
    """Tells from a file's first bytes whether it is packed, and how."""
    if head[:3] == b"\x1f\x8b\x08":
        return "GZIP"
    # zlib: the method is 8 with a window of at most 32 KiB, and both bytes together are a multiple of 31.
    if len(head) >= 2 and head[0] & 15 == 8 and head[0] >> 4 <= 7 and (head[0] << 8 | head[1]) % 31 == 0:
        return "ZLIB"
    return "none"


class PlainSource:
    """A file as it is; it can be passed over without being read."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._at = 0

    def size(self) -> int | None:
        """Returns how many bytes there are, as far as that can be told."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, size_bytes: int) -> bytes:
        """Returns the next bytes, so many or fewer; none at the end."""
        data = self._file.read(size_bytes)
        self._at += len(data)
        return data

    def skip(self, size_bytes: int) -> int:
        """Passes over so many bytes, and returns how many there were to pass over."""
        there = min(size_bytes, max(0, os.fstat(self._file.fileno()).st_size - self._at))
        self._at = self._file.seek(there, os.SEEK_CUR)
        return there

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class PackedSource:
    """What a gzip or zlib file holds; several gzip files after one another are one, as for gzip itself."""

    def __init__(self, path: Path, compression: Compression) -> None:
        self._path, self._kind = path, compression
        self._file = path.open("rb", buffering=0)
        self._read = 0
        self._packed = b""
        self._unpack = zlib.decompressobj(_WINDOW_BITS[compression])
        self._fresh = True  # nothing of the present gzip member has been seen yet

    def size(self) -> int | None:
        """Returns None: it is known at the end."""
        return None

    def read(self, size_bytes: int) -> bytes:
        """Returns the next unpacked bytes, so many or fewer; none at the end."""
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
        """Passes over so many unpacked bytes, and returns how many there were to pass over."""
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
    """Returns an object that packs as TensorFlow does, to the same bytes."""
    return zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, _WINDOW_BITS[compression], _MEMORY_LEVEL)
