"""Writes TFRecord files, with the same bytes as TensorFlow.

Used by `data.convert` and users' programs. What always holds: a file under its final name is complete; until `close` it has a
hidden name; an exception or a kill never replaces an existing file.
"""

from __future__ import annotations

import os
import secrets
import struct
import warnings
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torchquorum.errors import ConfigError, DataError
from torchquorum.formats.compression import packer, parse_compression
from torchquorum.formats.crc32c import masked_crc32c
from torchquorum.formats.example import Example
from torchquorum.formats.tfrecord import MAX_RECORD_BYTES

_BUFFER_BYTES = 1 << 18


def frame(record: bytes) -> bytes:
    """Returns a record as it is stored: its length, its data, their checksums."""
    length = struct.pack("<Q", len(record))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), record, struct.pack("<I", masked_crc32c(record)))
    )


class TFRecordWriter:
    """Writes a TFRecord file; the file appears, complete, when the writer is closed.

    As a context manager it closes at the end of the block; after an exception it writes nothing.

    Args:
        path: The file; an existing one is replaced at the end.
        compression: "GZIP", "ZLIB" or None.

    Raises:
        ConfigError: There is no such compression, or the path is a folder or device.
        DataError: The file cannot be written there.
    """

    def __init__(self, path: str | Path, compression: str | None = None) -> None:
        self._closed, self._finished = True, False
        kind = parse_compression(compression)
        if kind is None:
            raise ConfigError("compression='auto': a writer needs 'GZIP', 'ZLIB' or None")
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"{self.path}: is not a regular file; give the path of a file")
        self._packer = None if kind == "none" else packer(kind)
        self._partial = self.path.with_name(f".{self.path.name}.partial-{secrets.token_hex(4)}")
        try:
            self._file = self._partial.open("xb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise self._unwritable(error) from error
        self._closed = False
        self.records = 0

    def write(self, record: bytes | Example) -> None:
        """Appends a record: bytes, or an `Example`, which is serialized.

        Raises:
            ConfigError: It is neither, or too long, or the writer is closed.
            DataError: It cannot be written; the unfinished file is removed.
        """
        if self._closed or self._finished:
            raise ConfigError(f"{self.path}: the writer is closed; create a new one")
        if isinstance(record, Example):
            record = record.SerializeToString()
        elif not isinstance(record, bytes):
            if not isinstance(record, bytearray | memoryview):
                raise ConfigError(f"{self.path}: a record must be bytes or an Example, not {type(record).__name__}")
            record = bytes(record)
        if len(record) > MAX_RECORD_BYTES:
            raise ConfigError(
                f"{self.path}: a record of {len(record):,} bytes; at most {MAX_RECORD_BYTES:,} are allowed"
            )
        self._put(frame(record))
        self.records += 1

    def flush(self) -> None:
        """Passes what was written, as far as it is compressed, to the operating system; the file appears at `close`."""
        if not self._closed and not self._finished:
            try:
                self._file.flush()
            except OSError as error:
                self.discard()
                raise self._unwritable(error) from error

    def finish(self) -> None:
        """Writes everything to disk; the file keeps its hidden name until `publish`, for callers that write several.

        Raises:
            DataError: It cannot be written; the unfinished file is removed.
        """
        if self._closed or self._finished:
            return
        if self._packer is not None:
            self._put(None)
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            self.discard()
            raise self._unwritable(error) from error
        self._finished = True

    def publish(self) -> None:
        """Gives a finished file its name.

        Raises:
            DataError: It cannot be renamed; the unfinished file is removed.
        """
        if self._closed:
            return
        assert self._finished
        try:
            self._partial.replace(self.path)
        except OSError as error:
            self.discard()
            raise self._unwritable(error) from error
        self._closed = True

    def close(self) -> None:
        """Finishes the file and gives it its name; from then on it is complete, whatever happens to this process.

        Raises:
            DataError: It cannot be written; the unfinished file is removed.
        """
        self.finish()
        self.publish()

    def discard(self) -> None:
        """Removes the unfinished file; an existing file stays."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self._partial.unlink()

    def _put(self, framed: bytes | None) -> None:
        try:
            if self._packer is None:
                assert framed is not None
                self._file.write(framed)
            else:
                self._file.write(self._packer.flush() if framed is None else self._packer.compress(framed))
        except OSError as error:
            self.discard()
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(f"{self.path}: it cannot be written: {error.strerror}; check the folder, or give another file")

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.close if kind is None else self.discard)()

    def __del__(self) -> None:
        if not self._closed:
            self.discard()
            warnings.warn(
                f"{self.path}: its writer was not closed, so the file was not written; call close(), or use `with`",
                RuntimeWarning,
                stacklevel=2,
            )
