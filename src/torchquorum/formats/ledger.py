"""The ledger: one JSON line per gradient, in the order of the decisions, and lines for other events.

Written by ps task 0 (`ledger_write`), read by users, `torchquorum report` and tests. On an object store it is a sequence of
`ledger_segments`. What always holds: a line is complete, except the last one of a killed run, which readers skip. A line that
begins with "event" is not a gradient. Every update of a run is known to its ledger, by its gradients or in the count of a `gap`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import msgspec

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
        lr: If it made a round full: the learning rate of each parameter group in that update.
        optimizer: Whose gradient it is, where there are several optimizers; versions are that one's.
        track: Which of these that is, from 1; not set for the first, whose versions are the global steps.
        weight: How much it counts in the mean of its round, where its worker says so.
        inner_step: Under local steps, how many its worker had made. A refused one is carried over: it is part of the next that is given.
        steps: How many of these it has.
        carries: How many refused ones before it are part of it.
        norm: Its norm (L2, over all variables); None if it is not finite, not set if it is not known.
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
    lr: list[float] | msgspec.UnsetType = msgspec.UNSET
    norm: float | msgspec.UnsetType | None = msgspec.UNSET
    optimizer: str | msgspec.UnsetType = msgspec.UNSET
    track: int | msgspec.UnsetType = msgspec.UNSET
    weight: float | msgspec.UnsetType = msgspec.UNSET
    inner_step: int | msgspec.UnsetType = msgspec.UNSET
    steps: int | msgspec.UnsetType = msgspec.UNSET
    carries: int | msgspec.UnsetType = msgspec.UNSET


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of the run or of one of its workers.

    Attributes:
        event: began (also after a restore), joined, came back, died, left, assigned, chose (another number of gradients for an
            update), saved, ended or gap (what could not be written).
        at: When, in seconds since the epoch.
        version: The version then.
        worker: Which worker; -1 for an event of the run.
        text: Why, or what was written.
        values: For `began` the configuration, for `left` the worker's results, for `chose` the number, for `gap` the numbers that
            are missing. Where there are several optimizers, for `chose` and `assigned` whose that is, and its `track`, from 1.
    """

    event: str
    at: float
    version: int
    worker: int = -1
    text: str = ""
    values: dict[str, Any] = {}


class DamagedLineError(ValueError):
    """A line of a ledger cannot be read."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)
_event_decoder = msgspec.json.Decoder(Event)
_EVENT = b'{"event"'
_BEGAN = b'{"event":"began"'
_BLOCK = 1 << 20


@lru_cache(1024)
def name_life(incarnation: int) -> str:
    """Returns a hexadecimal name for an incarnation, from which the incarnation cannot be computed.

    With the incarnation one could impersonate the worker at a ps without a secret, and other users may read a run's folder.
    """
    return blake2b(str(incarnation).encode(), digest_size=8, person=b"tq-life").hexdigest()


def encode_line(record: Entry | Event) -> bytes:
    """Returns a record as a line of the ledger."""
    return _encoder.encode(record) + b"\n"


def decode_line(line: bytes) -> Entry | Event:
    """Returns the record of a line.

    Raises:
        DamagedLineError: The line cannot be read.
    """
    try:
        return (_event_decoder if line.startswith(_EVENT) else _decoder).decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedLineError(str(error)) from error


def version_after(record: Entry | Event) -> int | None:
    """Returns the global step up to which the ledger knows every update once it has this record, unless a gap says otherwise.

    None if the record says nothing about that: it is about another optimizer than the first.
    """
    if isinstance(record, Event):
        return record.version
    return record.met + record.accepted if record.track is msgspec.UNSET else None


def version_made(record: Entry | Event) -> int | None:
    """Returns the global step that a record tells the making of; None if it tells of none."""
    if isinstance(record, Event):
        return record.version if record.event == "assigned" and not record.values.get("track") else None
    return record.met + 1 if record.accepted and record.track is msgspec.UNSET else None


def last_known(tail: bytes) -> int | None:
    """Returns the version up to which a ledger with these last lines knows the run; None if no line can be read."""
    for line in reversed(tail.splitlines(keepends=True)):
        if line.endswith(b"\n"):
            with contextlib.suppress(DamagedLineError):
                version = version_after(decode_line(line))
                if version is not None:
                    return version
    return None


def told_in_ledger(folder: Path) -> int | None:
    """Returns the newest version that a worker of a durable run was told of, as its ledger says; None if the run was not durable.

    A gradient names the version it was computed at, which its worker was told of. Only the run's last life counts. Of several
    optimizers the versions are added up: who knows one of each knows a place in the log with at least so many updates.
    """
    try:
        with (folder / NAME).open("rb") as file:
            file.seek(_last_beginning(file))
            told: dict[str, int] | None = None
            for line in file:
                with contextlib.suppress(DamagedLineError):
                    record = decode_line(line)
                    if isinstance(record, Event) and record.event == "began":
                        began = record.values.get("versions") or {"": record.version}
                        told = dict(began) if record.values.get("durable") else None
                    elif told is not None and isinstance(record, Entry):
                        of = record.optimizer or ""
                        told[of] = max(told.get(of, 0), min(record.version, record.met))
            return None if told is None else sum(told.values())
    except OSError:
        return None


def _last_beginning(file: IO[bytes]) -> int:
    """Returns where the last line `began` stands in a ledger; 0 if there is none."""
    end = file.seek(0, 2)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start + len(_BEGAN)).rfind(_BEGAN)
        if found >= 0:
            return start + found
        end = start
    return 0


def read_ledger(path: Path) -> Iterator[Entry]:
    """Yields the entries of a ledger file, or of a run's folder."""
    for record in read_records(path):
        if isinstance(record, Entry):
            yield record


def read_records(
    path: Path, damaged: Callable[[int], None] | None = None, torn: Callable[[int], None] | None = None
) -> Iterator[Entry | Event]:
    """Yields the lines of a ledger file, or of a run's folder: gradients and events.

    Args:
        path: The file, or the run's folder.
        damaged: Called with the number of each line that cannot be read, which is skipped; without it such a line is an error.
        torn: Called with the number of a last line without an end, which is always skipped.
    """
    path = path / NAME if path.is_dir() else path
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # still being written, or cut off by a kill
                if torn is not None:
                    torn(number)
                continue
            try:
                yield decode_line(line)
            except DamagedLineError:
                if damaged is None:
                    raise
                damaged(number)
