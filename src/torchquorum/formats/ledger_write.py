"""Writes the ledger, and goes on writing it when the disk was full, the store away or the folder removed.

Owned by the run's history on ps task 0. What always holds: training never waits for a ledger that cannot be written; lines that
cannot be written are kept while there is room, then counted, and the count becomes a line of its own, a `gap`, at its place;
a file that was removed or cut is noticed within seconds and begun again; before a run goes on at a version that its ledger does
not reach, the difference is written as a gap.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchquorum.clock import SYSTEM, Clock
from torchquorum.formats.in_use import Hold
from torchquorum.formats.ledger import NAME, Entry, Event, encode_line, last_known, version_after, version_made
from torchquorum.formats.ledger_segments import SegmentWriter, read_last_segment
from torchquorum.formats.owner_object import OwnerBeat
from torchquorum.formats.repeated_failure import RepeatedFailure
from torchquorum.formats.storage import Location, RemotePath, is_memory, locate

KEPT_BYTES = 1 << 16
TAIL_BYTES = 1 << 20
RETRY_S = 1.0
LOOK_EVERY_S = 5.0


def open_ledger(logdir: str | None, say: Callable[[str], None], clock: Clock = SYSTEM) -> LedgerWriter | None:
    """Returns the writer of the ledger in a run's folder; None if there is no folder."""
    return LedgerWriter(locate(logdir), say, clock) if logdir is not None else None


@dataclass(slots=True)
class Gap:
    """What could not be written: how many records, and of which updates and times.

    Attributes:
        first: The first update that is missing, the version that it made; 0 if none is.
        last: The last one.
        accepted: How many accepted gradients are missing.
        refused: How many refused ones.
        events: How many other lines.
        began_at: When the first of them was decided, in seconds since the epoch.
    """

    first: int = 0
    last: int = 0
    accepted: int = 0
    refused: int = 0
    events: int = 0
    began_at: float = 0.0

    def __bool__(self) -> bool:
        return self.accepted + self.refused + self.events > 0

    def count(self, record: Entry | Event) -> None:
        """Counts a record that is not written."""
        at = record.at if isinstance(record, Event) else record.arrived_at
        self.began_at = self.began_at if self else at
        if isinstance(record, Event):
            self.events += 1
        elif record.accepted:
            self.accepted += 1
        else:
            self.refused += 1
        if (made := version_made(record)) is not None:
            self.first, self.last = self.first or made, made

    def line(self, wall: float, version: int, why: str) -> Event:
        """Returns the event that stands for all of it."""
        values = {"gradients": self.accepted + self.refused, "accepted": self.accepted, "refused": self.refused}
        return gap_event(wall, version, (self.first, self.last), why, events=self.events, since=self.began_at, **values)


def gap_event(at: float, version: int, updates: tuple[int, int], why: str, **values: float) -> Event:
    """Returns the event of a gap: updates `first` to `last` are not in the ledger one by one; (0, 0) for none."""
    first, last = updates
    count = last - first + 1 if first else 0
    return Event("gap", at, version, text=why, values={"first": first, "last": last, "updates": count, **values})


class LedgerFile:
    """The ledger on a file system: appends whole lines, or nothing.

    Attributes:
        known: The version up to which the file knew the run when it was opened; None for a new file.
        torn_bytes: The size of an unfinished last line, which was removed.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.torn_bytes = remove_torn_line(path)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, TAIL_BYTES, max(0, self._size - TAIL_BYTES))
        self.known = last_known(tail)

    def write(self, lines: bytes | bytearray) -> None:
        """Appends lines; if that fails, none of them.

        Raises:
            OSError: They cannot be written.
        """
        before = os.fstat(self._fd).st_size
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # the lines that were written are written again with the others
                os.ftruncate(self._fd, before)
            raise
        self._size = before + len(lines)

    def flush(self) -> None:
        """Does nothing: the operating system has what was written."""

    def sync(self) -> None:
        """Waits until the lines are on disk."""
        os.fdatasync(self._fd)

    def what_happened(self) -> str:
        """Returns what others have done to the file: was removed, was replaced, was cut; empty for nothing."""
        try:
            there, ours = os.stat(self._path), os.fstat(self._fd)
        except FileNotFoundError:
            return "was removed"
        except OSError:
            return ""  # nothing is known; writing will tell
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            return "was replaced"
        return "was cut" if ours.st_size < self._size else ""

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


class LedgerWriter:
    """Appends records; buffered, so call `flush` regularly.

    Args:
        folder: The run's folder.
        say: Prints a line for people.
        clock: Tells the time.

    Attributes:
        losses: How often the file was found removed, replaced or cut.
    """

    def __init__(self, folder: Location, say: Callable[[str], None] = print, clock: Clock = SYSTEM) -> None:
        self._folder, self._say, self._clock = folder, say, clock
        self._path = folder / NAME
        self._trouble = RepeatedFailure(say, clock)
        self._why = ""
        self._lines = bytearray()
        self._gap = Gap()
        self._file: LedgerFile | SegmentWriter | None = None
        self._known: int | None = None
        self._began: Event | None = None
        self._handed = 0  # the version up to which records were handed to a file
        self._version = 0  # and that of the last record that is kept in `_lines`
        self._closed = False
        self.losses = 0
        self._retry_at = self._look_at = clock.now()
        self._hold = _hold(folder, clock)
        try:
            self._open()
        except OSError as error:
            self._failed(error)

    def write(self, record: Entry | Event) -> None:
        """Appends one line."""
        if self._closed:
            return
        if self._began is None and isinstance(record, Event) and record.event == "began":
            self._began, self._handed = record, record.version
            if self._file is not None:
                self._fill_hole("the ledger of the run before did not reach this version")
        if self._gap or (self._trouble.lasts and len(self._lines) >= KEPT_BYTES):
            self._gap.count(record)
            return
        self._lines += encode_line(record)
        version = version_after(record)
        self._version = self._version if version is None else version
        if len(self._lines) >= KEPT_BYTES and not self._trouble.lasts:
            self.flush()

    @property
    def known(self) -> int:
        """Returns the version up to which the ledger has the updates of the run before this one."""
        return 0 if self._known is None else self._known

    def restore(self, entries: Sequence[Entry]) -> None:
        """Appends the lines of the update that follows the last known one; before the run's own begin. Of what does not follow, nothing."""
        assert self._began is None, "the run has begun"
        version = version_after(entries[-1])
        if self._file is not None and version == self.known + 1:
            self._known = version
            for entry in entries:
                self._lines += encode_line(entry)

    def flush(self) -> None:
        """Passes what was written to the operating system, and now and then looks whether the file is still there."""
        if self._closed:
            return
        now = self._clock.now()
        if now >= self._look_at:
            self.check()
        elif now >= self._retry_at or not self._trouble.lasts:
            self._write_all()

    def check(self) -> None:
        """Looks whether the file is still there with all that was written, begins it again if not, and flushes."""
        if self._closed:
            return
        self._look_at = self._clock.now() + LOOK_EVERY_S
        if isinstance(self._hold, Hold):
            self._hold.renew()
        if happened := self._what_happened():
            self._say(
                f"the ledger {self._path} {happened} while the run goes on. It is begun again where it must be, and has the "
                "updates that are missing in it as a gap; give each run a folder of its own, and leave it there"
            )
            if isinstance(self._file, SegmentWriter):
                self._file.give_up()
            elif self._file is not None:
                self._file.close()
            self._file, self._why = None, f"the ledger {happened}"
            self.losses += 1
        self._write_all()

    def _what_happened(self) -> str:
        if isinstance(self._hold, OwnerBeat):
            return "was removed" if self._hold.was_removed() else ""
        return self._file.what_happened() if isinstance(self._file, LedgerFile) else ""

    @property
    def taken_by(self) -> str:
        """Returns which other run writes to the folder now; empty if none does."""
        return self._hold.taken_by if isinstance(self._hold, OwnerBeat) else ""

    def sync(self) -> None:
        """Flushes, and waits until it is on disk."""
        self.flush()
        if not self._closed and isinstance(self._file, LedgerFile) and not self._trouble.lasts:
            try:
                self._file.sync()
            except OSError as error:
                self._failed(error)

    def close(self) -> None:
        """Flushes and closes; says what could not be written."""
        if self._closed:
            return
        self._write_all()
        self._closed = True
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._why = error.strerror or str(error)
            self._say(f"the last lines of the ledger {self._path} could not be written ({self._why})")
        if self._gap or self._lines:
            waiting = self._lines.count(b"\n")
            missing = waiting + self._gap.accepted + self._gap.refused + self._gap.events
            self._say(f"the ledger {self._path} ends without its last {missing} lines ({self._why})")
        if self._hold is not None:
            self._hold.release()

    # -- the file -----------------------------------------------------------------------------------------------------

    def _open(self) -> LedgerFile | SegmentWriter:
        if isinstance(self._folder, RemotePath):
            self._known = last_known(read_last_segment(self._folder, NAME))
            self._file = SegmentWriter(self._folder, NAME, self._clock)
        else:
            self._file = LedgerFile(self._folder / NAME)
            self._known = self._file.known
            if self._file.torn_bytes:
                self._insert(self._gap_up_to(0, "an unfinished last line was removed", self._file.torn_bytes))
            if isinstance(self._hold, Hold):
                self._hold.renew()
        if self._began is not None:
            self._fill_hole(self._why or "the ledger could not be written")
        return self._file

    def _fill_hole(self, why: str) -> None:
        """Before the lines that wait, a gap stands for the updates that the file should know and does not."""
        known = 0 if self._known is None else self._known
        if known < self._handed:
            self._insert(self._gap_up_to(known + 1, why))
        if self._known is None and self._began is not None and self._handed > self._began.version:
            self._insert(self._began)  # the file is new, the run is not: readers need its configuration
        self._known = self._handed

    def _gap_up_to(self, first: int, why: str, torn_bytes: int = 0) -> Event:
        more = {"torn_bytes": torn_bytes} if torn_bytes else {}
        last = self._handed if first else 0
        return gap_event(self._clock.wall(), self._handed, (first, last), why, **more)

    def _insert(self, event: Event) -> None:
        self._lines[:0] = encode_line(event)

    def _write_all(self) -> None:
        """Writes the lines that wait, then the gap; says what happens."""
        self._retry_at = self._clock.now() + RETRY_S
        try:
            file = self._file or self._open()
            if self._lines:
                file.write(self._lines)
                self._lines.clear()
                self._handed = max(self._handed, self._version)
            if self._gap:
                file.write(encode_line(self._gap.line(self._clock.wall(), self._gap.last or self._handed, self._why)))
                self._handed = max(self._handed, self._gap.last)
                missed, self._gap = self._gap, Gap()
                self._say(
                    f"the ledger {self._path} has a gap: {missed.accepted + missed.refused} gradients are counted in it"
                )
            file.flush()
        except OSError as error:
            self._failed(error)
        else:
            self._trouble.over(f"the ledger {self._path} can be written again, and goes on")

    def _failed(self, error: OSError) -> None:
        self._why = error.strerror or str(error)
        waiting = self._lines.count(b"\n")
        counted = f", {self._gap.accepted + self._gap.refused} gradients only counted" if self._gap else ""
        self._trouble.tell(
            f"the ledger {self._path} cannot be written ({self._why}); training goes on, and it is tried again "
            f"every second: {waiting} lines wait{counted}"
        )


def _hold(folder: Location, clock: Clock) -> Hold | OwnerBeat | None:
    """Marks a folder as used by this process; the memory of one process needs no mark."""
    if isinstance(folder, Path):
        return Hold(folder)
    return OwnerBeat(folder, clock) if not is_memory(str(folder)) else None


def sync_ledger(folder: Path) -> None:
    """Waits until the ledger of a run is on disk, so that the next checkpoint is not ahead of it."""
    try:
        fd = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # the run has no ledger
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def remove_torn_line(path: Path) -> int:
    """Removes the incomplete last line of a killed run, so that the next line does not join it; returns its size."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = start = file.seek(0, 2)
        while start > 0:
            start = max(0, start - (1 << 16))
            file.seek(start)
            newline = file.read(min(1 << 16, size - start)).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return size - (start + newline + 1)
        file.truncate(0)
        return size
