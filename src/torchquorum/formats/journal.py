"""The journal: every update of a shard since the last checkpoint, so that a killed ps loses none.

A ps task appends a record before it reports the update to any worker; the chief and the ps tasks read the records when the
variables are restored. A file begins with a `Head`; a record is a `Record` and the bytes of the mean gradient. What always
holds: a record is used only if its checksum is right and it follows the one before, so an unfinished record is left out; a file
changes only at its end.

A file belongs to one generation, one creation of the variables. A generation that continues another names it (`after`): a
checkpoint of that one is followed by its records up to the start of the new generation, then by the new one's. Records of a
generation that is not in this line are never replayed.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchquorum.errors import TorchQuorumError
from torchquorum.formats.crc32c import crc32c
from torchquorum.formats.storage import sync_path

Payload = bytes | npt.NDArray[np.uint8]  # arrays must be read-only
MODES = ("write", "fsync")
SUFFIX = ".journal"
MAGIC = b"tqjournal1\n"
_FRAME = struct.Struct("<IQI")  # size of the struct, size of the payload, checksum of both
MAX_HEADER_BYTES = 16 << 20
_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space there",
    errno.EDQUOT: "the quota is used up: free some space there",
    errno.EROFS: "the file system is read-only: make it writable",
    errno.EACCES: "this user may not write there: change the permissions",
    errno.ENOENT: "it does not exist: was it removed, and do all ps tasks see the same folder?",
}


class JournalError(TorchQuorumError):
    """The journal cannot be written or replayed."""


class Head(msgspec.Struct, array_like=True):
    """The header of a file.

    Attributes:
        shard: The index of the ps task that wrote it.
        num_shards: The number of ps tasks.
        generation: The creation of the variables that it belongs to.
        after: The generation that it continues, 0 for none.
        start: The version before its first record.
        at: When the generation began, in nanoseconds since the epoch, by the chief's clock.
        plan: Variables, optimizer, schedule, averages, placement of the updates.
    """

    shard: int
    num_shards: int
    generation: int
    after: int
    start: int
    at: int
    plan: dict[str, Any]


class Record(msgspec.Struct, array_like=True):
    """One update; the mean gradient of the shard follows as bytes.

    Attributes:
        version: The version after the update.
        absent: Variables (by index) without a gradient.
        keys: The gradients whose mean it is: worker, incarnation, local step.
        batches: The batches of shared data that they were computed from, by share.
        settings: The options of the optimizer that changed with it, by parameter group.
        assigned: Variables (by index) that were given values, which follow instead of a gradient; then it is no update.
    """

    version: int
    absent: list[int]
    keys: list[tuple[int, int, int]]
    batches: dict[str, list[int]] = {}
    settings: list[dict[str, Any]] = []
    assigned: list[int] = []


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(Head)
_record_decoder = msgspec.msgpack.Decoder(Record)


class JournalWriter:
    """Appends the updates of one shard. Owned by the ps thread.

    With `write` a record is in the page cache when `append` returns, so it survives the death of the process; with `fsync`,
    `commit` waits until it is on disk, so it survives a power loss too.

    Args:
        folder: The run's folder.
        head: The header of the first file.
        mode: write or fsync.

    Attributes:
        path: The file that is written now.
        uncommitted: Whether `commit` has something to wait for.
    """

    def __init__(self, folder: Path, head: Head, mode: str) -> None:
        assert mode in MODES, mode
        self._folder, self._head, self._sync = folder, head, mode == "fsync"
        self.uncommitted = False
        self._fd, self.path, self._size = -1, folder, 0
        self._open(head.start)

    def append(self, record: Record, payload: Payload) -> None:
        """Writes an update.

        Raises:
            JournalError: It cannot be written; the file ends with the record before.
        """
        try:
            self._write(_encoder.encode(record), payload)
        except OSError as error:
            raise self._failed(error) from error
        self.uncommitted = self._sync

    def commit(self) -> None:
        """Waits until the appended records are on disk, in mode fsync."""
        if self.uncommitted:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise self._failed(error) from error
            self.uncommitted = False

    def rotate(self, version: int) -> None:
        """Begins a new file: once the checkpoint of this version is complete, the earlier files are not needed."""
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
        head = msgspec.structs.replace(self._head, start=version)
        self.path = self._folder / journal_name(head)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Readable by the owner only: with a worker's incarnation one could impersonate it at a ps without a secret.
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._size = 0
            os.write(self._fd, MAGIC)
            self._size = len(MAGIC)
            self._write(_encoder.encode(head), b"")
            if self._sync:
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


def frame_header(packed: bytes, payload: Payload) -> bytes:
    """Returns the bytes before a record: the sizes of its two parts, and their checksum."""
    return _FRAME.pack(len(packed), len(payload), _checksum(packed, payload))


def _checksum(packed: bytes, payload: Payload) -> int:
    return crc32c(packed + crc32c(payload).to_bytes(4, "little"))  # pyright: ignore[reportArgumentType]


def read_head(path: Path) -> Head | None:
    """Returns the header of a journal file; None if it has no complete one."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return _take_head(file)
    return None


def read_file(path: Path) -> Iterator[tuple[Record, memoryview]]:
    """Yields the records of a file, up to the first incomplete one."""
    with path.open("rb") as file:
        head = _take_head(file)
        expected = head.start + 1 if head is not None else -1
        while head is not None and (frame := _take_frame(file)) is not None:
            try:
                record = _record_decoder.decode(frame[0])
            except msgspec.DecodeError:
                return
            if record.version != expected:
                return
            expected += 1
            yield record, memoryview(frame[1])


def _take_head(file: IO[bytes]) -> Head | None:
    if file.read(len(MAGIC)) != MAGIC or (found := _take_frame(file)) is None:
        return None
    try:
        return _head_decoder.decode(found[0])
    except msgspec.DecodeError:
        return None


def _take_frame(file: IO[bytes]) -> tuple[bytes, bytes] | None:
    start = file.read(_FRAME.size)
    if len(start) < _FRAME.size:
        return None
    header_bytes, payload_bytes, checksum = _FRAME.unpack(start)
    left = os.fstat(file.fileno()).st_size - file.tell()
    if header_bytes > MAX_HEADER_BYTES or header_bytes + payload_bytes > left:
        return None
    packed, payload = file.read(header_bytes), file.read(payload_bytes)
    return (packed, payload) if _checksum(packed, payload) == checksum else None


def last_version(path: Path, head: Head) -> int:
    """Returns the version after a file's last record. Reads every byte."""
    return max((record.version for record, _ in read_file(path)), default=head.start)


@dataclass(slots=True)
class Lineage:
    """The files of one shard that follow a checkpoint, in order, and the version that they reach.

    Attributes:
        files: Each with the last version to replay from it.
        generations: The generations that wrote them, the checkpoint's own first.
        version: The version that they reach.
        plan: The plan of the updates; None if there are none.
    """

    files: list[tuple[Path, int]] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    version: int = 0
    plan: dict[str, Any] | None = None


def _heads(folder: Path) -> list[tuple[Path, Head]]:
    found = [(path, head) for path in folder.glob(f"*{SUFFIX}") if (head := read_head(path)) is not None]
    return sorted(found, key=lambda entry: (entry[1].at, entry[1].start))


def find_lineage(folder: Path, shard: int, num_shards: int, generation: int, step: int) -> Lineage:
    """Finds the updates that follow a checkpoint of `step`, made in `generation`, on one shard. Reads every byte.

    Raises:
        JournalError: They were written with another number of ps tasks.
    """
    line = Lineage([], [generation], step)
    for path, head in _heads(folder):
        new = head.generation not in line.generations
        if head.generation == 0 or (new and head.after not in line.generations):
            continue
        if head.num_shards != num_shards:
            if last_version(path, head) > step:
                raise JournalError(
                    f"{path} holds updates after step {step} and was written by {head.num_shards} ps tasks, not {num_shards}. "
                    f"Start once with --ps {head.num_shards} to write a checkpoint; or remove the file to go back "
                    f"to step {step}."
                )
            continue
        if head.shard != shard or head.start > line.version:
            continue
        if new:
            line.generations.append(head.generation)
            line.files = [(before, min(upto, head.start)) for before, upto in line.files]
            line.version = max(step, min(line.version, head.start))
        last = last_version(path, head)
        if last > line.version:
            line.files.append((path, last))
            line.version, line.plan = last, head.plan
    return line


def find_common(folder: Path, num_shards: int, generation: int, step: int) -> Lineage:
    """Finds the version that all shards can reach after a checkpoint; it includes every update reported to a worker.

    Returns:
        The lineage of shard 0, with the version that all shards reach.
    """
    lines = [find_lineage(folder, shard, num_shards, generation, step) for shard in range(num_shards)]
    first = lines[0]
    first.version = min(line.version for line in lines)
    first.generations = [r for r in first.generations if all(r in line.generations for line in lines)]
    return first


def replay_lineage(line: Lineage, step: int, upto: int) -> Iterator[tuple[Record, memoryview]]:
    """Yields the records from `step` to `upto`, each once, in order."""
    version = step
    for path, last in line.files:
        for record, payload in read_file(path):
            if record.version > min(last, upto):
                break
            if record.version == version + 1:
                version += 1
                yield record, payload
    if version != upto:
        raise JournalError(f"the journal in {line.files} reaches version {version}, not {upto}")


def clear(folder: Path, generation: int, step: int) -> list[Path]:
    """Removes the files that a new checkpoint of `step` in `generation` replaces: all but that generation's later ones."""
    removed = []
    for path in folder.glob(f"*{SUFFIX}"):
        head = read_head(path)
        if head is None or head.generation != generation or head.start < step:
            with suppress(FileNotFoundError):
                path.unlink()
                removed.append(path)
    return removed
