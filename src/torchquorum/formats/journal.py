"""The journal: every update of a shard since the last checkpoint, so that a killed ps loses none.

Who makes an update appends its record before any worker is told of it: the ps task, or on the fast path a worker
(`torchquorum.formats.journal_write`). The chief and the ps tasks read the records when the variables are restored. A file begins
with a `Head`; a record is a `Record` and the bytes of the mean gradient, after a frame with
their sizes and checksum and a checksum of its own. What always holds: a record is used only if its checksum is right and it
follows the one before; a file changes only at its end; a record that a kill left unfinished is told from a damaged one, by a
frame that is right and bytes that are missing at the end of the file.

A file belongs to one generation, one creation of the variables. A generation that continues another names it (`after`): a
checkpoint of that one is followed by its records up to the start of the new generation, then by the new one's. Records of a
generation that is not in this line are never replayed. A file begins with all updates up to its start: what the one before it has beyond
that was never published, such as the record of a worker that was frozen in its turn.
"""

from __future__ import annotations

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

from torchquorum.errors import TorchQuorumError
from torchquorum.formats.crc32c import crc32c

MODES = ("write", "fsync")
SUFFIX = ".journal"
NAMED = re.compile(r"shard-([0-9]{5,10})-of-([0-9]{5,10})-([0-9a-f]{16})-([0-9]{1,18})\.journal")
MAGIC = b"tqjournal2\n"
FRAME = struct.Struct("<IQI")  # size of the struct, size of the payload, checksum of both
CHECK = struct.Struct("<I")  # checksum of the frame itself
_FRAME_BYTES = FRAME.size + CHECK.size
_SEARCHED_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20


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


class GradientNote(msgspec.Struct, array_like=True):
    """What the ledger has of a gradient in an update: the version it was computed at, its loss, when it came, its norm, the rates."""

    computed_at: int
    loss: float | None
    wall: float
    norm: float | None
    rates: list[float] = []


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
        given: Of each of `keys`, what the ledger has of it, where a worker made the update: the ps hears of that later.

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
    given: list[GradientNote] = []

    @property
    def number(self) -> int:
        """Returns which update of the run it is; of one optimizer that is its version."""
        return self.place or self.version


_head_decoder = msgspec.msgpack.Decoder(Head)
_record_decoder = msgspec.msgpack.Decoder(Record)


def checksum_of(packed: bytes, payload_checksum: int) -> int:
    """Returns the checksum of a record: of its struct, and of the checksum of its payload."""
    return crc32c(packed + payload_checksum.to_bytes(4, "little"))


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
    frame, (check,) = start[: FRAME.size], CHECK.unpack(start[FRAME.size :])
    header_bytes, payload_bytes, checksum = FRAME.unpack(frame)
    if crc32c(frame) != check or header_bytes > MAX_HEADER_BYTES:
        return Bad.LOST
    left = os.fstat(file.fileno()).st_size - file.tell()
    if header_bytes + payload_bytes > left:
        return Bad.TORN
    packed, payload = file.read(header_bytes), file.read(payload_bytes)
    return (packed, payload) if checksum_of(packed, crc32c(payload)) == checksum else Bad.DAMAGED


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
            frame = block[place : place + FRAME.size]
            if crc32c(frame) == CHECK.unpack_from(block, int(place) + FRAME.size)[0]:
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
            self.generations.append(head.generation)
            self.starts.append(head.start)
            self.told = max(step, min(self.version, head.start))
        # It began with all updates up to its start: what the file before has beyond that does not count.
        self.files = [(before, min(upto, head.start)) for before, upto in self.files]
        self.version = self.seen = max(step, min(self.version, head.start))
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
