"""The ledger on disk: one JSON line per gradient, in the order of the decisions, and between them what else happened.

Written by ps task 0, read by people, `torchquorum report` and tests. On an object store it is a row of `segments`. What
always holds: a line is written whole or not at all, except the last one of a run that was killed, which readers skip. A
line that begins with "event" is no gradient.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from torchquorum.formats.in_use import Hold
from torchquorum.formats.segments import SegmentWriter
from torchquorum.formats.storage import Location, RemotePath, locate

NAME = "ledger.jsonl"


class Entry(msgspec.Struct, frozen=True):
    """What became of one gradient.

    Attributes:
        worker: The worker's index.
        incarnation: Which life of that worker; see `name_life`.
        local_step: Its how-manieth gradient in that life.
        version: The version it was computed at.
        met: The version it met.
        staleness: met - version.
        accepted: Whether it joined the round.
        reason: Why, in a word or two.
        arrived_at: When it arrived, in seconds since the epoch.
        loss: The loss it came from, where the worker said so.
        took_s: Seconds since its worker was last released: what it took to compute and to send. The rest of the time
            since the worker's previous gradient it waited.
        batches: The batches of shared data that it was computed from, by share, where the data is shared out.
    """

    worker: int
    incarnation: str
    local_step: int
    version: int
    met: int
    staleness: int
    accepted: bool
    reason: str
    arrived_at: float
    loss: float | None = None
    took_s: float | None = None
    batches: dict[str, list[int]] | msgspec.UnsetType = msgspec.UNSET


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened to the run or to one of its workers.

    Attributes:
        event: began (also after a restore), joined, came back, died, left, saved or ended.
        at: When, in seconds since the epoch.
        version: The version then.
        worker: Which worker, -1 where it is not about one.
        text: Why, or what was written.
        values: Of `began` the configuration, of `left` the worker's results.
    """

    event: str
    at: float
    version: int
    worker: int = -1
    text: str = ""
    values: dict[str, Any] = {}


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)
_event_decoder = msgspec.json.Decoder(Event)
_EVENT = b'{"event"'


@lru_cache(1024)
def name_life(incarnation: int) -> str:
    """Returns a name for a worker's life, in hexadecimal, from which its incarnation cannot be told.

    Whoever knows that could speak in the worker's name at a ps without a secret, and a run's folder may be open to more people.
    """
    return blake2b(str(incarnation).encode(), digest_size=8, person=b"tq-life").hexdigest()


def open_ledger(logdir: str | None, say: Callable[[str], None]) -> LedgerWriter | None:
    """Opens the ledger in a run's folder; None, with a word to people, where there is no folder or it cannot be written."""
    if logdir is None:
        return None
    try:
        return LedgerWriter(locate(logdir), say)
    except OSError as error:
        say(f"no ledger: {logdir} cannot be written ({error.strerror}); training goes on")
        return None


class LedgerWriter:
    """Appends entries; buffered, so `flush` now and then.

    A disk that is full, or gone, ends the ledger and not the run: `say` hears of it once, and later entries are dropped.
    """

    def __init__(self, folder: Location, say: Callable[[str], None] = print) -> None:
        self._path, self._say = folder / NAME, say
        self._hold: Hold | None = None
        if isinstance(folder, RemotePath):
            self._file = SegmentWriter(folder, NAME)
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        _mend(path)
        self._file = path.open("ab", buffering=1 << 16)
        self._hold = Hold(folder)

    def write(self, entry: Entry | Event) -> None:
        """Appends one line."""
        if not self._file.closed:
            try:
                self._file.write(_encoder.encode(entry) + b"\n")
            except OSError as error:
                self._end(error)

    def flush(self) -> None:
        """Hands what was written to the operating system."""
        if not self._file.closed:
            try:
                self._file.flush()
            except OSError as error:
                self._end(error)

    def sync(self) -> None:
        """Flushes, and waits until the disk has it."""
        self.flush()
        if not self._file.closed and not isinstance(self._file, SegmentWriter):
            try:
                os.fdatasync(self._file.fileno())
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        """Flushes and closes."""
        self.flush()
        try:
            self._file.close()
        except OSError as error:
            self._end(error)
        if self._hold is not None:
            self._hold.release()

    def _end(self, error: OSError) -> None:
        with contextlib.suppress(OSError):  # it closes, and fails once more to write what it holds
            self._file.close()
        self._say(f"the ledger {self._path} ends here: it cannot be written ({error.strerror}); training goes on")


def sync_ledger(folder: Path) -> None:
    """Waits until the disk has the ledger of a run, so that a checkpoint that is about to be published is not ahead of it."""
    try:
        fd = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # there is none: the run goes on without
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def _mend(path: Path) -> None:
    """Cuts off the torn last line of a run that was killed, so that the next line does not become a part of it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = start = file.seek(0, 2)
        while start > 0:
            start = max(0, start - (1 << 16))
            file.seek(start)
            newline = file.read(size - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
        file.truncate(0)


def read_ledger(path: Path) -> Iterator[Entry]:
    """Yields the entries of a ledger file, or of a run's folder."""
    for record in read_records(path):
        if isinstance(record, Entry):
            yield record


def read_records(path: Path, damaged: Callable[[int], None] | None = None) -> Iterator[Entry | Event]:
    """Yields the lines of a ledger file, or of a run's folder: gradients, and what else happened.

    Args:
        path: The file, or the run's folder.
        damaged: Told the number of each line that cannot be read, which is then skipped; without it such a line is an error.
    """
    path = path / NAME if path.is_dir() else path
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                continue  # still being written, or torn by a kill
            try:
                yield (_event_decoder if line.startswith(_EVENT) else _decoder).decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                if damaged is None:
                    raise
                damaged(number)
