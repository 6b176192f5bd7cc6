"""Writing the journal: a record after the one before it, by the ps task, or on the fast path by the worker that makes the update.

`JournalWriter` is owned by the ps thread; `write_record` and `encode_record` are called by workers (`torchquorum.fastpath.update_journal`)
while the ps has lent them the file. What always holds: one process at a time writes to a file; what it has written of a record counts only
if all of it is there, and nothing is written behind a part of one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from torchquorum.formats.crc32c import crc32c
from torchquorum.formats.journal import CHECK, FRAME, MAGIC, MODES, SUFFIX, Head, JournalError, Record, checksum_of
from torchquorum.formats.storage import sync_path

Payload = bytes | npt.NDArray[np.uint8]  # arrays must be read-only
Pieces = Sequence[Payload]
MOST_PIECES = 512  # at once; the system takes 1024
_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space there",
    errno.EDQUOT: "the quota is used up: free some space there",
    errno.EROFS: "the file system is read-only: make it writable",
    errno.EACCES: "this user may not write there: change the permissions",
    errno.ENOENT: "it does not exist: was it removed, and do all ps tasks see the same folder?",
}

_encoder = msgspec.msgpack.Encoder()


def encode_record(record: Record) -> bytes:
    """Returns the struct of a record as it stands in a file."""
    return _encoder.encode(record)


def frame_of(packed: bytes, payload_bytes: int, payload_checksum: int) -> bytes:
    """Returns the bytes before a record: the sizes of its two parts, and their checksum."""
    frame = FRAME.pack(len(packed), payload_bytes, checksum_of(packed, payload_checksum))
    return frame + CHECK.pack(crc32c(frame))


def frame_header(packed: bytes, payload: Payload) -> bytes:
    """Returns the bytes before a record whose payload is one piece."""
    return frame_of(packed, len(payload), crc32c(payload))  # pyright: ignore[reportArgumentType]


def write_record(fd: int, at: int, packed: bytes, pieces: Pieces, checksum: int) -> int:
    """Writes a record whose payload lies in pieces, from a place of the file on; returns where it ends.

    Raises:
        OSError: It cannot be written; a part of it may stand there.
    """
    header = frame_of(packed, sum(map(len, pieces)), checksum) + packed
    rest: list[Payload] = [header, *pieces]
    while rest:
        some, rest = rest[:MOST_PIECES], rest[MOST_PIECES:]
        wanted, written = sum(map(len, some)), os.pwritev(fd, some, at)  # pyright: ignore[reportArgumentType]
        at += written
        if written < wanted:  # a full disk writes a part; the next write reports the error
            left = memoryview(b"".join(map(bytes, some)))[written:]
            while left:
                written = os.pwrite(fd, left, at)
                left, at = left[written:], at + written
    return at


class JournalWriter:
    """Appends the updates of one shard. Owned by the ps thread.

    With `write` a record is in the page cache when `append` returns, so it survives the death of the process; with `fsync`,
    `commit` waits until it is on disk, so it survives a power loss too. While the file is lent, workers append to it.

    Args:
        folder: The run's folder.
        head: The header of the first file.
        mode: write or fsync.

    Attributes:
        path: The file that is written now.
        number: How many files were begun.
        synced: Whether updates are on disk before a worker is told of them.
        uncommitted: Whether `commit` has something to wait for.
    """

    def __init__(self, folder: Path, head: Head, mode: str) -> None:
        assert mode in MODES, mode
        self._folder, self.synced = folder, mode == "fsync"
        self._head = msgspec.structs.replace(head, synced=self.synced)
        self.uncommitted = self._lent = False
        self._fd, self.path, self._size, self.number = -1, folder, 0, 0
        self._open(head.start)

    def append(self, record: Record, payload: Payload) -> None:
        """Writes an update.

        Raises:
            JournalError: It cannot be written; the file ends with the record before.
        """
        assert not self._lent, "workers write the journal"
        try:
            self._write(_encoder.encode(record), payload)
        except OSError as error:
            raise self._failed(error) from error
        self.uncommitted = self.synced

    def commit(self) -> None:
        """Waits until the appended records are on disk, in mode fsync."""
        if self.uncommitted:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise self._failed(error) from error
            self.uncommitted = False

    @property
    def removed(self) -> bool:
        """Whether the file has lost its name: what is written to it cannot be found again."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def lend(self) -> tuple[int, int]:
        """Workers append from now on; returns the descriptor of the file, and where it ends."""
        self._lent = True
        return self._fd, self._size

    def note_foreign(self) -> None:
        """A worker has appended what it may not have waited for: whoever is told of it waits for the disk."""
        self.uncommitted = self.synced

    def take_back(self, end: int, version: int, *, settled: bool) -> None:
        """Workers append no more.

        Args:
            end: Where the file ends, as far as it counts.
            version: The version that it leads to.
            settled: Nobody was in the middle of an update. A worker that was may write on whenever it runs again, so another file is
                begun: what it still writes is not read.

        Raises:
            JournalError: Another file cannot be begun.
        """
        if not self._lent:
            return
        self._lent, self._size = False, end
        os.lseek(self._fd, end, os.SEEK_SET)
        if not settled:
            self.uncommitted = self.synced
            self.rotate(version)

    def rotate(self, version: int) -> None:
        """Begins a new file: once the checkpoint of this version is complete, the earlier files are not needed."""
        assert not self._lent, "workers write the journal"
        self.commit()
        os.close(self._fd)
        self._fd = -1
        self._open(version)

    def close(self) -> None:
        """Commits and closes."""
        if self._fd >= 0:
            with suppress(JournalError):
                self.commit()
            os.close(self._fd)
            self._fd = -1

    def _open(self, version: int) -> None:
        head, before = msgspec.structs.replace(self._head, start=version), self.path
        self.path = self._folder / journal_name(head)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self.path == before:  # that one has no update that counts, and a worker may still write to it
                with suppress(FileNotFoundError):
                    os.unlink(self.path)
            # Readable by the owner only: with a worker's incarnation one could impersonate it at a ps without a secret.
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._size, self.number = 0, self.number + 1
            os.write(self._fd, MAGIC)
            self._size = len(MAGIC)
            self._write(_encoder.encode(head), b"")
            if self.synced:
                os.fdatasync(self._fd)
                sync_path(self._folder)
        except OSError as error:
            failed = self._failed(error)
            self.close()
            raise failed from error

    def _write(self, packed: bytes, payload: Payload) -> None:
        pieces = [frame_header(packed, payload), packed, payload]
        wanted = sum(len(piece) for piece in pieces)
        written = os.writev(self._fd, pieces)
        if written < wanted:  # a full disk writes a part; the next write reports the error
            rest = b"".join(pieces)[written:]
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        self._size += wanted

    def _failed(self, error: OSError) -> JournalError:
        if self._fd >= 0:
            with suppress(OSError):  # removes the unfinished record
                os.ftruncate(self._fd, self._size)
        advice = _ADVICE.get(error.errno or 0, "check that folder")
        return JournalError(
            f"the journal {self.path} cannot be written ({error.strerror}); {advice}, then start the tasks again: every "
            "update that was reported to a worker is saved. Without --durable a run continues when its folder is full."
        )


def journal_name(head: Head) -> str:
    """Returns the name of a file."""
    return f"shard-{head.shard:05d}-of-{head.num_shards:05d}-{head.generation:016x}-{head.start}{SUFFIX}"
