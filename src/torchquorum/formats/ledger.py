"""The ledger: one JSON line per gradient, in the order of the decisions, and lines for other events.

Written by ps task 0, read by users, `torchquorum report` and tests. On an object store it is a sequence of `ledger_segments`.
What always holds: a line is complete, except the last one of a killed run, which readers skip. A line that begins with "event"
is not a gradient.
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

from torchquorum.clock import SYSTEM, Clock
from torchquorum.formats.in_use import Hold
from torchquorum.formats.ledger_segments import SegmentWriter
from torchquorum.formats.storage import Location, RemotePath, locate

NAME = "ledger.jsonl"


class Entry(msgspec.Struct, frozen=True):
    """The decision on one gradient.

    Attributes:
        worker: The worker's index.
        incarnation: Which incarnation of that worker; see `name_life`.
        local_step: The number of the gradient in that incarnation, from 1.
        version: The version it was computed at.
        met: The version it met on arrival.
        staleness: met - version.
        accepted: Whether it joined the round.
        reason: Why it was accepted or refused.
        arrived_at: When it arrived, in seconds since the epoch.
        loss: Its loss, if the worker reported it.
        took_s: Seconds since its worker was last released, to compute and to send it. The worker waited for the rest of the
            time since its previous gradient.
        batches: The batches of shared data that it was computed from, by share.
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
    """An event of the run or of one of its workers.

    Attributes:
        event: began (also after a restore), joined, came back, died, left, saved or ended.
        at: When, in seconds since the epoch.
        version: The version then.
        worker: Which worker; -1 for an event of the run.
        text: Why, or what was written.
        values: For `began` the configuration, for `left` the worker's results.
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
    """Returns a hexadecimal name for an incarnation, from which the incarnation cannot be computed.

    With the incarnation one could impersonate the worker at a ps without a secret, and other users may read a run's folder.
    """
    return blake2b(str(incarnation).encode(), digest_size=8, person=b"tq-life").hexdigest()


def open_ledger(logdir: str | None, say: Callable[[str], None], clock: Clock = SYSTEM) -> LedgerWriter | None:
    """Opens the ledger in a run's folder; returns None if there is no folder, or it cannot be written, which `say` reports."""
    if logdir is None:
        return None
    try:
        return LedgerWriter(locate(logdir), say, clock)
    except OSError as error:
        say(f"no ledger: {logdir} cannot be written ({error.strerror}); training goes on")
        return None


class LedgerWriter:
    """Appends entries; buffered, so call `flush` regularly.

    A full or missing disk ends the ledger, not the run: `say` reports it once, and later entries are dropped.
    """

    def __init__(self, folder: Location, say: Callable[[str], None] = print, clock: Clock = SYSTEM) -> None:
        self._path, self._say = folder / NAME, say
        self._hold: Hold | None = None
        if isinstance(folder, RemotePath):
            self._file = SegmentWriter(folder, NAME, clock)
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        remove_torn_line(path)
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
        """Passes what was written to the operating system."""
        if not self._file.closed:
            try:
                self._file.flush()
            except OSError as error:
                self._end(error)

    def sync(self) -> None:
        """Flushes, and waits until it is on disk."""
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
        with contextlib.suppress(OSError):  # close() fails again on the buffered bytes
            self._file.close()
        self._say(f"the ledger {self._path} stops here: it cannot be written ({error.strerror}); training goes on")


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


def remove_torn_line(path: Path) -> None:
    """Removes the incomplete last line of a killed run, so that the next line does not join it."""
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
    """Yields the lines of a ledger file, or of a run's folder: gradients and events.

    Args:
        path: The file, or the run's folder.
        damaged: Called with the number of each line that cannot be read, which is skipped; without it such a line is an error.
    """
    path = path / NAME if path.is_dir() else path
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                continue  # still being written, or cut off by a kill
            try:
                yield (_event_decoder if line.startswith(_EVENT) else _decoder).decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                if damaged is None:
                    raise
                damaged(number)
