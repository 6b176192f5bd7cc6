"""The ledger on disk: one JSON line per gradient, in the order of the decisions.

Written by ps task 0, read by people, `torchquorum report` and tests. What always holds: a line is written whole or not at
all, except the last one of a run that was killed, which readers skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

NAME = "ledger.jsonl"


class Entry(msgspec.Struct, frozen=True):
    """What became of one gradient.

    Attributes:
        worker: The worker's index.
        incarnation: Which life of that worker, in hexadecimal.
        local_step: Its how-manieth gradient in that life.
        version: The version it was computed at.
        met: The version it met.
        staleness: met - version.
        accepted: Whether it joined the round.
        reason: Why, in a word or two.
        arrived_at: When it arrived, in seconds since the epoch.
        loss: The loss it came from, where the worker said so.
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


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


class LedgerWriter:
    """Appends entries; buffered, so `flush` now and then."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        _mend(path)
        self._file = path.open("ab", buffering=1 << 16)

    def write(self, entry: Entry) -> None:
        """Appends one entry."""
        self._file.write(_encoder.encode(entry) + b"\n")

    def flush(self) -> None:
        """Hands what was written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes."""
        self._file.close()


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
    path = path / NAME if path.is_dir() else path
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _decoder.decode(line)
