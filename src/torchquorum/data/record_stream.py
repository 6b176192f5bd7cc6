"""The stream of a share's records: shuffled, epoch after epoch, from any position.

Called by `tfrecords`. What always holds: the order is a pure function of the seed, the epoch, the share and the files, so a
position is two numbers: the epoch, and how many of its records have been taken. To go there the random draws are repeated with
numbers in place of records; only the records that are then in the shuffle buffer are read, the others are skipped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from torchquorum.data.shares import FileShare, ShareReader
from torchquorum.errors import DataError

_T = TypeVar("_T")
_BLOCK = 1024
Record = tuple[bytes, int]


class Shuffler(Generic[_T]):
    """A shuffle buffer as in tf.data: it is filled, then each item that leaves is replaced by the next one.

    Args:
        source: Returns the next items, at most as many as asked for; none at the end.
        size: The capacity of the buffer; 0 keeps the order.
        seed: Seed of the draws. Python's generator gives the same draws in every version.
    """

    def __init__(self, source: Callable[[int], Sequence[_T]], size: int, seed: str) -> None:
        self._source, self._size = source, size
        self._random = random.Random(seed)
        self.buffer: list[_T] = []
        self.entered = 0  # how many items the source has given
        self._draining = False

    def take(self, count: int) -> list[_T]:
        """Returns the next items, fewer only at the end."""
        if self._size == 0:
            return self._take_in_order(count)
        while not self._draining and len(self.buffer) < self._size:
            self._fill(self._size - len(self.buffer))
        taken: list[_T] = []
        draw, buffer, size = self._random.random, self.buffer, self._size
        while len(taken) < count and not self._draining:
            items = self._source(min(_BLOCK, count - len(taken)))
            if not items:
                self._drain()
            self.entered += len(items)
            for item in items:
                slot = int(draw() * size)
                taken.append(buffer[slot])
                buffer[slot] = item
        if self._draining:
            rest = min(count - len(taken), len(buffer))
            taken += buffer[len(buffer) - rest :][::-1]
            del buffer[len(buffer) - rest :]
        return taken

    def continue_with(self, source: Callable[[int], Sequence[_T]], buffer: list[_T]) -> None:
        """Continues with another source and other items in the buffer."""
        self._source, self.buffer = source, buffer

    def _fill(self, room: int) -> None:
        items = self._source(min(_BLOCK, room))
        if not items:
            self._drain()
        self.entered += len(items)
        self.buffer += items

    def _drain(self) -> None:
        """The source has ended: shuffles the buffer once more; items then leave it from its end."""
        self._draining = True
        buffer, draw = self.buffer, self._random.random
        for last in range(len(buffer) - 1, 0, -1):
            slot = int(draw() * (last + 1))
            buffer[last], buffer[slot] = buffer[slot], buffer[last]

    def _take_in_order(self, count: int) -> list[_T]:
        taken: list[_T] = []
        while len(taken) < count and (items := self._source(count - len(taken))):
            self.entered += len(items)
            taken += items
        return taken


@dataclass(frozen=True, slots=True)
class RecordSource:
    """Which records are read, and in which order.

    Attributes:
        paths: The files.
        share: Which of their records.
        name: The name of the share, part of the seed of its draws.
        seed: Seed of all draws.
        shuffle: The size of the shuffle buffer, 0 for none.
        shuffle_files: Whether each epoch reads the files in a different order.
        compression: As for `RecordReader`.
        verify: Whether to verify checksums.
    """

    paths: tuple[Path, ...]
    share: FileShare
    name: str
    seed: int
    shuffle: int
    shuffle_files: bool
    compression: str | None
    verify: bool

    def open(self, epoch: int) -> ShareReader:
        """Returns a reader of one epoch."""
        share = self.share
        if self.shuffle_files:
            # All workers that divide these files by record need the same order, or a record would come twice.
            files, draw = list(share.files), random.Random(f"files {self.seed} {epoch}")
            for last in range(len(files) - 1, 0, -1):
                slot = int(draw.random() * (last + 1))
                files[last], files[slot] = files[slot], files[last]
            share = replace(share, files=tuple(files))
        return ShareReader(self.paths, share, self.compression, verify=self.verify)


class RecordStream:
    """The records of a share, epoch after epoch. Owned by one thread.

    Attributes:
        epoch: The epoch of the next record.
        taken: How many of its records have been taken.
    """

    def __init__(self, records: RecordSource, epoch: int, taken: int, end: int | None) -> None:
        """Goes to a position; reads nothing before the first record.

        Args:
            records: What is read.
            epoch: The first epoch.
            taken: How many records of this epoch to skip.
            end: The epoch before which the stream ends, None for never.
        """
        self._records, self._end = records, end
        self.epoch, self.taken = epoch, taken
        self._reader: ShareReader | None = None
        self._shuffler: Shuffler[Record] | None = None

    def take(self, count: int) -> list[Record]:
        """Returns the next records, fewer only at the stream's end.

        Raises:
            DataError: A file cannot be read, a record is damaged, or an endless stream has no records.
        """
        records: list[Record] = []
        while len(records) < count and (self._end is None or self.epoch < self._end):
            if self._shuffler is None:
                self._begin()
                assert self._shuffler is not None
            some = self._shuffler.take(count - len(records))
            self.taken += len(some)
            records += some
            if len(records) < count:
                self._finish_epoch()
        return records

    def close(self) -> None:
        """Closes the file that is open, if one is."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._shuffler = None

    def _finish_epoch(self) -> None:
        if self.taken == 0 and self._end is None:
            self.close()
            paths = self._records.paths
            which = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
            raise DataError(
                f"{which}: no records for this share ({self._records.name}), and repeat=None would search for ever; "
                "use at least as many records as workers, or fewer workers"
            )
        self.close()
        self.epoch, self.taken = self.epoch + 1, 0

    def _begin(self) -> None:
        records = self._records
        self._reader = records.open(self.epoch)
        if self.taken == 0 or records.shuffle == 0:
            self._reader.skip(self.taken)
            self._shuffler = self._make_shuffler(self._reader.read)
            return
        total: int | None = None
        while True:
            numbers = self._make_shuffler(_count_up(total))
            numbers.take(self.taken)
            total = self._load(numbers)
            if total is None:
                return
            self._reader.close()  # the epoch is shorter than assumed, so its last records come in another order
            self._reader = records.open(self.epoch)

    def _make_shuffler(self, source: Callable[[int], Sequence[_T]]) -> Shuffler[_T]:
        records = self._records
        return Shuffler(source, records.shuffle, f"records {records.seed} {self.epoch} {records.name}")

    def _load(self, numbers: Shuffler[int]) -> int | None:
        """Reads the records whose numbers are in a shuffle buffer; if the epoch has too few records, returns their number."""
        reader = self._reader
        assert reader is not None
        loaded: dict[int, Record] = {}
        at = 0
        for first, end in [*_runs(sorted(numbers.buffer)), (numbers.entered, numbers.entered)]:
            skipped = reader.skip(first - at)
            if skipped < first - at:
                return at + skipped
            at = first
            while at < end:
                records = reader.read(end - at)
                if not records:
                    return at
                loaded.update(zip(range(at, at + len(records)), records, strict=True))
                at += len(records)
        shuffler: Shuffler[Record] = numbers  # pyright: ignore[reportAssignmentType]
        shuffler.continue_with(reader.read, [loaded[number] for number in numbers.buffer])
        self._shuffler = shuffler
        return None


def _count_up(total: int | None) -> Callable[[int], Sequence[int]]:
    """Returns a source of the numbers from 0 on."""
    given = 0

    def source(count: int) -> Sequence[int]:
        nonlocal given
        first, given = given, given + count if total is None else min(given + count, total)
        return range(first, given)

    return source


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Returns (first, end) of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
