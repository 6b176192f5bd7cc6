"""The journal: every update of a shard since the last checkpoint, so that a killed ps loses none.

A ps task appends a record before it reports the update to any worker; the chief and the ps tasks read the records when the
variables are restored. A file begins with a `Head`; a record is a `Record` and the bytes of the mean gradient, after a frame with
their sizes and checksum and a checksum of its own. What always holds: a record is used only if its checksum is right and it
follows the one before; a file changes only at its end; a record that a kill left unfinished is told from a damaged one, by a
frame that is right and bytes that are missing at the end of the file.

A file belongs to one generation, one creation of the variables. A generation that continues another names it (`after`): a
checkpoint of that one is followed by its records up to the start of the new generation, then by the new one's. Records of a
generation that is not in this line are never replayed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
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
NAMED = re.compile(r"shard-([0-9]{5,10})-of-([0-9]{5,10})-([0-9a-f]{16})-([0-9]{1,18})\.journal")
MAGIC = b"tqjournal2\n"
_FRAME = struct.Struct("<IQI")  # size of the struct, size of the payload, checksum of both
_CHECK = struct.Struct("<I")  # checksum of the frame itself
_FRAME_BYTES = _FRAME.size + _CHECK.size
_SEARCHED_BYTES = 1 << 20
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
        synced: Whether updates are on disk before a worker is told of them, so that a loss of power may damage what comes after.
    """

    shard: int
    num_shards: int
    generation: int
    after: int
    start: int
    at: int
    plan: dict[str, Any]
    synced: bool = False


class Record(msgspec.Struct, array_like=True):
    """One update; the mean gradient of the shard follows as bytes.

    Attributes:
        version: The version after the update.
        absent: Variables (by index) without a gradient.
        keys: The gradients whose mean it is: worker, incarnation, local step.
        batches: The batches of shared data that they were computed from, by share.
        settings: The options of the optimizer that changed with it, by parameter group.
        assigned: Variables (by index) that were given values, which follow instead of a gradient; then it is no update.
        told: The newest version that one of the gradients was computed at: every shard had told its worker of that one.
        state: What there is of the optimizer's state, where that was assigned; its bytes follow, after those of the values if any.
        rows: Of each table that it touches, the table's number and how many rows: their keys, mean gradients and sightings follow.
        evicted_at: The time at which rows went after it, if some could.
        track: Which optimizer's it is.
        place: How many updates there were of all optimizers, where there are several.

    Where there are several optimizers, `told`, and every version of a file, a lineage or a replay here, counts the updates of all.
    """

    version: int
    absent: list[int]
    keys: list[tuple[int, int, int]]
    batches: dict[str, list[int]] = {}
    settings: list[dict[str, Any]] = []
    assigned: list[int] = []
    told: int = 0
    state: dict[str, Any] | None = None
    rows: list[tuple[int, int]] = []
    evicted_at: float = 0.0
    track: int = 0
    place: int = 0

    @property
    def number(self) -> int:
        """Returns which update of the run it is; of one optimizer that is its version."""
        return self.place or self.version


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
        self._folder, self._sync = folder, mode == "fsync"
        self._head = msgspec.structs.replace(head, synced=self._sync)
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

    @property
    def removed(self) -> bool:
        """Whether the file has lost its name: what is written to it cannot be found again."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

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
    frame = _FRAME.pack(len(packed), len(payload), _checksum(packed, payload))
    return frame + _CHECK.pack(crc32c(frame))


def _checksum(packed: bytes, payload: Payload) -> int:
    return crc32c(packed + crc32c(payload).to_bytes(4, "little"))  # pyright: ignore[reportArgumentType]


def read_head(path: Path) -> Head | None:
    """Returns the header of a journal file; None if it has no complete one."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        found = _take_head(file)
        return found if isinstance(found, Head) else None
    return None


def read_file(path: Path) -> Iterator[tuple[Record, memoryview]]:
    """Yields the records of a file, up to the first that is incomplete or damaged."""
    with path.open("rb") as file:
        head = _take_head(file)
        expected = head.start + 1 if isinstance(head, Head) else -1
        while expected > 0 and isinstance(found := _take_record(file), tuple) and found[0].number == expected:
            expected += 1
            yield found


class Bad(Enum):
    """What is where a header or a record should be."""

    END = "the end of the file"
    TORN = "a part of one, cut off at the end of the file"
    DAMAGED = "one whose checksum is wrong"
    LOST = "bytes that do not even say how long it is"


def _take_head(file: IO[bytes]) -> Head | Bad:
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        return Bad.TORN if MAGIC.startswith(magic) else Bad.LOST
    found = _take_frame(file)
    if isinstance(found, Bad):
        return found
    try:
        return _head_decoder.decode(found[0])
    except msgspec.DecodeError:
        return Bad.LOST


def _take_record(file: IO[bytes]) -> tuple[Record, memoryview] | Bad:
    found = _take_frame(file)
    if isinstance(found, Bad):
        return found
    try:
        return _record_decoder.decode(found[0]), memoryview(found[1])
    except msgspec.DecodeError:
        return Bad.DAMAGED


def _take_frame(file: IO[bytes]) -> tuple[bytes, bytes] | Bad:
    start = file.read(_FRAME_BYTES)
    if len(start) < _FRAME_BYTES:
        return Bad.TORN if start else Bad.END
    frame, (check,) = start[: _FRAME.size], _CHECK.unpack(start[_FRAME.size :])
    header_bytes, payload_bytes, checksum = _FRAME.unpack(frame)
    if crc32c(frame) != check or header_bytes > MAX_HEADER_BYTES:
        return Bad.LOST
    left = os.fstat(file.fileno()).st_size - file.tell()
    if header_bytes + payload_bytes > left:
        return Bad.TORN
    packed, payload = file.read(header_bytes), file.read(payload_bytes)
    return (packed, payload) if _checksum(packed, payload) == checksum else Bad.DAMAGED


def _find_frame(file: IO[bytes]) -> bool:
    """Goes to the next frame that is right, after one that is not; returns whether there is one."""
    at = file.tell() - _FRAME_BYTES + 1
    while True:
        file.seek(at)
        block = file.read(_SEARCHED_BYTES)
        if len(block) < _FRAME_BYTES:
            return False
        values = np.frombuffer(block, np.uint8)
        # A struct of 1 to 65535 bytes and a payload below 4 GiB: of the places that look so, few are not frames.
        small = (values[2:-17] == 0) & (values[3:-16] == 0) & ((values[:-19] != 0) | (values[1:-18] != 0))
        small &= (values[8:-11] == 0) & (values[9:-10] == 0) & (values[10:-9] == 0) & (values[11:-8] == 0)
        for place in np.flatnonzero(small):
            frame = block[place : place + _FRAME.size]
            if crc32c(frame) == _CHECK.unpack_from(block, int(place) + _FRAME.size)[0]:
                file.seek(at + int(place))
                return True
        at += len(block) - _FRAME_BYTES + 1


@dataclass(slots=True)
class Contents:
    """What a file has.

    Attributes:
        last: The version after the last record that can be used.
        seen: The last version of which there is a record at all, also after a damaged one.
        told: The newest version that a worker was told of, as far as the records say. The file's beginning says nothing of it: this
            shard had that version, and others may not have had it yet.
        damage: What is wrong in it, for people; empty if nothing is, or only its last record is unfinished.
    """

    last: int
    seen: int
    told: int
    damage: str = ""


def look_through(path: Path, head: Head) -> Contents:
    """Reads every byte of a file, also those after a damaged record, if they can be told apart.

    Raises:
        JournalError: The file cannot be read.
    """
    contents, bad_at = Contents(head.start, head.start, 0), 0
    try:
        with path.open("rb") as file:
            _take_head(file)
            while (found := _take_record(file)) not in (Bad.END, Bad.TORN):
                right = isinstance(found, tuple) and found[0].number == contents.last + 1
                if right and not bad_at:
                    contents.last += 1
                elif not bad_at:
                    bad_at = contents.last + 1
                if isinstance(found, tuple):
                    contents.told = max(contents.told, found[0].told)
                    contents.seen = max(contents.seen, found[0].number)
                if found is Bad.LOST and not _find_frame(file):
                    break
    except OSError as error:
        raise JournalError(f"the journal {path} cannot be read ({error.strerror}): make it readable") from error
    # A loss of power may damage what was not on disk yet, of which no worker was told: the records at the end.
    unsynced = head.synced and contents.seen < bad_at
    if bad_at and not unsynced:
        contents.seen = max(contents.seen, bad_at)
        contents.damage = f"the record of update {bad_at} in {path} is damaged"
    return contents


def last_version(path: Path, head: Head) -> int:
    """Returns the version after a file's last record that can be used. Reads every byte."""
    return look_through(path, head).last


@dataclass(slots=True)
class Lineage:
    """The files of one shard that follow a checkpoint, in order, and the version that they reach.

    Attributes:
        files: Each with the last version to replay from it.
        generations: The generations that wrote them, the checkpoint's own first.
        starts: The version at which each of these began; of the checkpoint's own, that of the checkpoint.
        version: The version that they reach.
        plan: The plan of the updates; None if there are none.
        seen: The last version of which they have a record, also behind damage.
        told: The newest version that a worker was told of, as far as they say.
        damage: What keeps them from going further, for people: each a file and a text.
    """

    files: list[tuple[Path, int]] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    version: int = 0
    plan: dict[str, Any] | None = None
    seen: int = 0
    told: int = 0
    damage: list[tuple[Path, str]] = field(default_factory=list)

    def kept(self) -> list[tuple[int, int]]:
        """Returns each generation with the last of its versions that a run which goes on from here has in its past."""
        return [(made, min([self.version, *self.starts[k + 1 :]])) for k, made in enumerate(self.generations)]

    def steps_after(self, step: int) -> int:
        """Returns how many of the versions after `step`, up to the one that is reached, are the first optimizer's."""
        if self.plan is None or not self.plan.get("more"):
            return self.version - step
        return sum(record.track == 0 for record, _ in replay_lineage(self, step, self.version))

    def add(self, path: Path, head: Head, step: int) -> None:
        """Adds a file of this line: its records are replayed if they go on from those before."""
        contents = look_through(path, head)
        if head.start > self.version:  # what lies between is missing
            self.seen, self.told = max(self.seen, contents.seen), max(self.told, contents.told, head.start)
            return
        if head.generation not in self.generations:
            # It began with all updates up to its start: what the generation before wrote beyond that does not count.
            self.generations.append(head.generation)
            self.starts.append(head.start)
            self.files = [(before, min(upto, head.start)) for before, upto in self.files]
            self.version = self.seen = self.told = max(step, min(self.version, head.start))
            self.damage.clear()
        if contents.last > self.version:
            self.files.append((path, contents.last))
            self.version, self.plan = contents.last, head.plan
        self.seen, self.told = max(self.seen, contents.seen), max(self.told, contents.told)
        if contents.damage and contents.seen > self.version:
            self.damage.append((path, contents.damage))


def _heads(folder: Path) -> tuple[list[tuple[Path, Head]], list[Path]]:
    """Returns the files with their headers, in the order of their beginnings, and those whose header is damaged."""
    found: list[tuple[Path, Head]] = []
    damaged: list[Path] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            with path.open("rb") as file:
                head = _take_head(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise JournalError(f"the journal {path} cannot be read ({error.strerror}): make it readable") from error
        if isinstance(head, Head):
            found.append((path, head))
        elif head in (Bad.DAMAGED, Bad.LOST):
            damaged.append(path)
    return sorted(found, key=lambda entry: (entry[1].at, entry[1].start)), damaged


def next_generation_at(folder: Path, wall: float) -> int:
    """Returns when a generation that begins now began, in nanoseconds: after all others in its folder, even if the clock went back."""
    return max([int(wall * 1e9), *(head.at + 1 for _, head in _heads(folder)[0])])


def find_lineage(folder: Path, shard: int, num_shards: int, generation: int, step: int) -> Lineage:
    """Finds the updates that follow a checkpoint of `step`, made in `generation`, on one shard. Reads every byte.

    Raises:
        JournalError: They were written with another number of ps tasks, or cannot be read.
    """
    line = Lineage([], [generation], [step], step, seen=step, told=step)
    known = {generation}
    heads, damaged = _heads(folder)
    for path, head in heads:
        if head.generation == 0 or (head.generation not in known and head.after not in known):
            continue
        if head.num_shards != num_shards:
            if last_version(path, head) > step:
                raise JournalError(
                    f"{path} holds updates after step {step} and was written by {head.num_shards} ps tasks, not {num_shards}. "
                    f"Start once with --ps {head.num_shards} to write a checkpoint; or move the file away and pass "
                    f"accept_loss=True (--accept-loss) to go back to step {step}."
                )
            continue
        if head.shard == shard:
            known.add(head.generation)
            line.add(path, head, step)
    for path in damaged:
        name = NAMED.fullmatch(path.name)
        if name and (int(name[1]), int(name[2])) == (shard, num_shards) and int(name[4]) >= line.version:
            line.damage.append((path, f"the beginning of {path} is damaged, or was written by another release"))
    return line


def find_common(folder: Path, num_shards: int, generation: int, step: int) -> Lineage:
    """Finds the version that all shards can reach after a checkpoint; it includes every update reported to a worker.

    Returns:
        The lineage of shard 0, with the version that all shards reach, what any of them says that workers were told, and the
        damage without which that version would be higher.
    """
    lines = [find_lineage(folder, shard, num_shards, generation, step) for shard in range(num_shards)]
    whole = [line.version for line in lines if not line.damage]
    common = min(line.version for line in lines)
    # A shard that is whole and ends here never had the next update: no worker was told of it, damaged elsewhere or not.
    damage = [found for line in lines for found in line.damage if line.version == common and common not in whole]
    first = lines[0]
    first.version, first.damage = common, damage
    first.seen, first.told = min(line.seen for line in lines), max(line.told for line in lines)
    known = [all(r in line.generations for line in lines) for r in first.generations]
    first.starts = [start for start, by_all in zip(first.starts, known, strict=True) if by_all]
    first.generations = [r for r, by_all in zip(first.generations, known, strict=True) if by_all]
    return first


def keep_damaged(path: Path) -> Path:
    """Gives a damaged file a second name, under which it stays when the next checkpoint removes the journal.

    Raises:
        OSError: That is impossible.
    """
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    try:
        os.link(path, aside)
    except OSError:
        shutil.copy2(path, aside)  # there are no second names in this file system
    return aside


def replay_lineage(line: Lineage, step: int, upto: int) -> Iterator[tuple[Record, memoryview]]:
    """Yields the records from `step` to `upto`, each once, in order."""
    version = step
    for path, last in line.files:
        for record, payload in read_file(path):
            if record.number > min(last, upto):
                break
            if record.number == version + 1:
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
