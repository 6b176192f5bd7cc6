"""The file of a record: frames of bytes, each with its size and checksum, appended and never changed.

Written by `torchquorum.server.recorder`, read by `torchquorum.replay`; what is in the frames is theirs. What always holds: a frame
counts only whole; one that a kill left unfinished at the end of the file is cut off when the file is opened again.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from torchquorum.errors import TorchQuorumError

NAME = "run.record"
MAGIC = b"tqrecord1\n"
MAX_FRAME_BYTES = 1 << 30
_FRAME = struct.Struct("<II")  # size, checksum of size and bytes


class RunRecordError(TorchQuorumError):
    """A record cannot be written, read or replayed."""


class RecordFile:
    """The record of a run's folder, opened to append.

    Args:
        folder: The run's folder.

    Attributes:
        torn_bytes: The size of an unfinished frame at its end, which was cut off.

    Raises:
        RunRecordError: It cannot be opened, or what is there is no record.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunRecordError(f"the record {self.path} cannot be opened ({error.strerror})") from error
        try:
            with os.fdopen(os.dup(self._fd), "rb") as file:
                end = _find_end(file, self.path)
            size = os.fstat(self._fd).st_size
            self.torn_bytes = size - end
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, end, os.SEEK_SET)
            if end == 0:
                os.write(self._fd, MAGIC)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, body: bytes) -> None:
        """Writes a frame; when this returns, the operating system has it.

        Raises:
            RunRecordError: It cannot be written.
        """
        size = len(body).to_bytes(4, "little")
        rest = memoryview(_FRAME.pack(len(body), zlib.crc32(body, zlib.crc32(size))) + body)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise RunRecordError(f"the record {self.path} cannot be written ({error.strerror})") from error

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _find_end(file: IO[bytes], path: Path) -> int:
    """Returns where the last whole frame ends."""
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        if MAGIC.startswith(magic):
            return 0
        raise RunRecordError(f"{path} is no record of a run, or was written by another release; move it away")
    end = len(MAGIC)
    while (body := _take(file)) is not None:
        end += _FRAME.size + len(body)
    return end


def _take(file: IO[bytes]) -> bytes | None:
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    size, checksum = _FRAME.unpack(head)
    if size > MAX_FRAME_BYTES:
        return None
    body = file.read(size)
    whole = len(body) == size and zlib.crc32(body, zlib.crc32(head[:4])) == checksum
    return body if whole else None


def read_record(folder: Path) -> Iterator[bytes]:
    """Yields the frames of a run's record.

    Raises:
        RunRecordError: There is none; or a frame in its middle is damaged.
    """
    path = folder / NAME
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise RunRecordError(
            f"{folder} has no record ({NAME}): only a run that was recorded can be replayed. Record one with `torchquorum run --record`, "
            "`torchquorum train --record` or tq.Session(record=True)"
        ) from None
    except OSError as error:
        raise RunRecordError(f"the record {path} cannot be read ({error.strerror})") from error
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RunRecordError(f"{path} is no record of a run, or was written by another release")
        while True:
            at = file.tell()
            body = _take(file)
            if body is None:
                break
            yield body
        file.seek(at)
        if (rest := file.read()) and not _is_torn(rest):
            raise RunRecordError(f"{path} is damaged at byte {at} of {at + len(rest)}: what follows cannot be read")


def _is_torn(rest: bytes) -> bool:
    """Whether the bytes behind the last whole frame are one that was not finished."""
    if len(rest) < _FRAME.size:
        return True
    size, _ = _FRAME.unpack_from(rest)
    return size > len(rest) - _FRAME.size
