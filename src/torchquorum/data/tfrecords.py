"""`tq.data.TFRecordDataset`: TFRecord files as batches for a training loop, with a position that a checkpoint can hold.

Called by users' programs, from one thread. Records are shared, shuffled, repeated, batched, parsed and read ahead, in this
order, as in tf.data. What always holds: the order of the records is a pure function of the arguments; the position is that of
the loop, whatever was read ahead; an error is raised where the loop asks for its next batch, and names file and offset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from torchquorum.data.columns import RowError
from torchquorum.data.coordinator import Prefetcher
from torchquorum.data.features import Specs, check_specs
from torchquorum.data.parsing import BatchParser
from torchquorum.data.record_stream import Record, RecordSource, RecordStream
from torchquorum.data.shares import PLACE_BITS, FileShare, check_share, find_files
from torchquorum.errors import ConfigError, DataError
from torchquorum.formats.compression import parse_compression

Position = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class _Delivery:
    """How records become the elements of the loop."""

    features: Specs | None
    parse: Callable[[bytes], Any] | None
    transform: Callable[[Any], Any] | None
    batch_size: int | None
    drop_remainder: bool
    repeat: int | None
    prefetch: int

    def __post_init__(self) -> None:
        _check_number("prefetch", self.prefetch, 0)
        if self.repeat is not None:
            _check_number("repeat", self.repeat, 1, "; None for no end")
        if self.batch_size is not None:
            _check_number("batch_size", self.batch_size, 1, "; None delivers single records")
        elif self.drop_remainder:
            raise ConfigError("drop_remainder=True without batch_size: there are no batches; set batch_size")
        if self.features is not None and self.parse is not None:
            raise ConfigError("features and parse: give only one; transform= changes what features= has parsed")
        for name, function in (("parse", self.parse), ("transform", self.transform)):
            if function is not None and not callable(function):
                raise ConfigError(f"{name}={function!r}: must be a function")


@dataclass(frozen=True, kw_only=True)
class _Order:
    """Which records are read, in which order."""

    shuffle: int
    shuffle_files: bool
    seed: int
    share: tuple[int, int] | None

    def __post_init__(self) -> None:
        _check_number("shuffle", self.shuffle, 0)
        _check_number("seed", self.seed, 0)
        check_share(self.share)

    @property
    def part(self) -> str:
        """Returns the share as text: index/count."""
        return "{}/{}".format(*check_share(self.share))

    def source(self, paths: tuple[Path, ...], compression: str | None, verify: bool) -> RecordSource:
        """Returns what is read of these files."""
        share = FileShare(tuple(range(len(paths)))).divide(*check_share(self.share))
        return RecordSource(paths, share, self.part, self.seed, self.shuffle, self.shuffle_files, compression, verify)

    def identity(self, paths: tuple[Path, ...]) -> dict[str, Any]:
        """Returns the settings that must be equal for a position to mean the same records."""
        order = {"shuffle": self.shuffle, "shuffle_files": self.shuffle_files, "seed": self.seed}
        return {"files": _digest(paths), "share": self.part, **order}


class TFRecordDataset(IterableDataset[Any]):
    """The records of TFRecord files, parsed and batched, as a torch IterableDataset.

    Each pass over it, `for batch in dataset`, goes through `repeat` epochs; the next pass continues with the next epoch, so
    it comes in another order. In a DataLoader use `batch_size=None` there and the batch size here; its processes divide
    the share among them.

    Args:
        files: A path, a pattern such as "data/train-*", or a list of these. A pattern's files come in the order of their
            names.
        features: What to read from each tf.train.Example: names with `tq.data.FixedLenFeature`, `tq.data.VarLenFeature` or
            `tq.data.RawFeature`. A batch is then a dict of tensors.
        parse: Instead of `features`, a function from a record's bytes to anything that torch's default_collate can batch.
            With neither, records are bytes.
        transform: A function of the whole batch; its result is delivered instead.
        shuffle: The size of the shuffle buffer in records; 0 keeps the order of the files.
        shuffle_files: Whether every epoch reads the files in a different order.
        repeat: Epochs per pass, None for no end. A batch may contain records of two epochs.
        batch_size: Records per batch; None delivers single records.
        drop_remainder: Whether to leave out a last, smaller batch.
        prefetch: How many batches a thread reads ahead; 0 for no thread.
        seed: Seed of the order; the same for all workers.
        share: (index, count): read this part of the records, for instance (task.index, task.num_workers). By whole files
            if there are at least as many as workers, otherwise by record.
        compression: "GZIP", "ZLIB", None for none, or "auto" to detect it for each file.
        verify: Whether to verify the checksums of the data.

    Raises:
        ConfigError: An argument is not allowed, or two contradict each other.
        DataError: A file does not exist.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        features: Specs | None = None,
        *,
        parse: Callable[[bytes], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        shuffle: int = 0,
        shuffle_files: bool = False,
        repeat: int | None = 1,
        batch_size: int | None = None,
        drop_remainder: bool = False,
        prefetch: int = 0,
        seed: int = 0,
        share: tuple[int, int] | None = None,
        compression: str | None = "auto",
        verify: bool = True,
    ) -> None:
        super().__init__()
        order = _Order(shuffle=shuffle, shuffle_files=shuffle_files, seed=seed, share=share)
        self._delivery = _Delivery(
            features=check_specs(features) if features is not None else None,
            parse=parse,
            transform=transform,
            batch_size=batch_size,
            drop_remainder=drop_remainder,
            repeat=repeat,
            prefetch=prefetch,
        )
        parse_compression(compression)
        paths = find_files(files)
        self._source = order.source(paths, compression, verify)
        self._identity = order.identity(paths)
        self._cursor = _Cursor()

    @property
    def files(self) -> tuple[Path, ...]:
        """Returns the files, of all shares, in order."""
        return self._source.paths

    @property
    def epoch(self) -> int:
        """Returns the epoch, from 0, of the next record; an epoch ends when the first record of the next one is taken."""
        return self._cursor.position["epoch"]

    def set_epoch(self, epoch: int) -> None:
        """Sets the next pass, from 0; for a DataLoader, whose processes always start from a fresh copy.

        Raises:
            ConfigError: It is not a whole number, 0 or more.
        """
        _check_number("epoch", epoch, 0)
        self._cursor.go_to_epoch(epoch * (self._delivery.repeat or 1))

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self, self._cursor, self._start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next record, and the settings that must be equal for it to mean the same records.

        JSON-compatible. The batch size is not part of it: a run may continue with another one.
        """
        return {**self._cursor.position, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position, also in the middle of a pass: the next batch is the one that would have followed there.

        Raises:
            ConfigError: The position is not valid, or belongs to other files or another order.
        """
        for name, value in self._identity.items():
            if name in state and state[name] != value:
                what = "other files (their names or sizes differ)" if name == "files" else f"{name}={state[name]!r}"
                raise ConfigError(
                    f"{name}={value!r}: the saved position belongs to {what}, and does not lead to the same records; use "
                    "the same, or start the data from the beginning"
                )
        position: dict[str, Any] = {name: state.get(name) for name in ("first_epoch", "epoch", "taken")}
        for name, value in position.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}={value!r} in the saved position: must be a whole number, 0 or more")
        self._cursor.jump = self._cursor.position = position

    def _start(self) -> _Elements | Prefetcher[Any]:
        """Begins a pass, at the loaded position if there is one; returns its elements."""
        source, loader = self._source, get_worker_info()
        if loader is not None:
            if self._cursor.jump is not None:
                raise ConfigError(
                    "the processes of a DataLoader cannot start at a position; use num_workers=0, or load the "
                    "position into tq.data.Prefetcher(loader)"
                )
            part = source.share.divide(loader.id, loader.num_workers)
            name = f"{source.name} {loader.id}/{loader.num_workers}"
            source = replace(source, share=part, name=name)
        position = self._cursor.begin(self._delivery.repeat or 1)
        elements = _Elements(source, self._delivery, position)
        return Prefetcher(elements, self._delivery.prefetch) if self._delivery.prefetch else elements


class _Cursor:
    """Where the loop is in a dataset; shared by the dataset and its passes.

    Attributes:
        position: The position of the next record.
        next_epoch: The first epoch of the next pass.
        jump: The position that was loaded and not yet gone to.
    """

    def __init__(self) -> None:
        self.go_to_epoch(0)

    def go_to_epoch(self, epoch: int) -> None:
        """Lets the next pass begin with an epoch."""
        self.next_epoch = epoch
        self.position: Position = {"first_epoch": epoch, "epoch": epoch, "taken": 0}
        self.jump: Position | None = None

    def begin(self, epochs: int) -> Position:
        """Begins a pass of some epochs; returns its position, the loaded one if there is one."""
        jump = self.jump
        if jump is None:
            self.go_to_epoch(self.next_epoch)
        else:
            self.position, self.jump = jump, None
        self.next_epoch = self.position["first_epoch"] + epochs
        return self.position


class _Pass:
    """One pass of the loop over a dataset: keeps the cursor at what was delivered, and follows it when it jumps."""

    def __init__(
        self, dataset: TFRecordDataset, cursor: _Cursor, start: Callable[[], _Elements | Prefetcher[Any]]
    ) -> None:
        self._dataset, self._cursor, self._start = dataset, cursor, start
        self._elements: _Elements | Prefetcher[Any] | None = None
        self._over = False

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        cursor, elements = self._cursor, self._elements
        if elements is None or cursor.jump is not None:
            if self._over and cursor.jump is None:
                raise StopIteration
            self._close()
            elements = self._elements = self._start()
            self._over = False
        try:
            element = next(elements)
        except StopIteration:
            self._over = True
            self._close()
            cursor.go_to_epoch(cursor.next_epoch)
            raise
        cursor.position = elements.state_dict()
        return element

    @property
    def waiting(self) -> int:
        """Returns how many elements are read ahead now."""
        return self._elements.waiting if isinstance(self._elements, Prefetcher) else 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the dataset's position."""
        return self._dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sends the dataset, and so this pass, to a position."""
        self._dataset.load_state_dict(state)

    def _close(self) -> None:
        if self._elements is not None:
            elements, self._elements = self._elements, None
            elements.close()


class _Elements:
    """The elements of a pass, with positions. Owned by one thread, that of the reader if there is one."""

    def __init__(self, source: RecordSource, delivery: _Delivery, position: Position) -> None:
        self._source, self._delivery = source, delivery
        self._parser = BatchParser(delivery.features) if delivery.features is not None else None
        self.load_state_dict(position)

    def __iter__(self) -> _Elements:
        return self

    def __next__(self) -> Any:
        delivery = self._delivery
        records = self._stream.take(delivery.batch_size or 1)
        if not records or (delivery.drop_remainder and len(records) < (delivery.batch_size or 1)):
            self._stream.close()
            raise StopIteration
        element = self._make(records)
        return element if delivery.transform is None else delivery.transform(element)

    def state_dict(self) -> Position:
        """Returns the position of the next record."""
        return {"first_epoch": self._first, "epoch": self._stream.epoch, "taken": self._stream.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position."""
        self._first = state["first_epoch"]
        repeat = self._delivery.repeat
        end = None if repeat is None else self._first + repeat
        self._stream = RecordStream(self._source, state["epoch"], state["taken"], end)

    def close(self) -> None:
        """Closes the open file."""
        self._stream.close()

    def _make(self, records: list[Record]) -> Any:
        single = self._delivery.batch_size is None
        data = [record for record, _ in records]
        if self._parser is not None:
            try:
                return self._parser.parse_one(data[0]) if single else self._parser.parse(data)
            except RowError as error:
                raise DataError(f"{self._place(records[error.row][1])}: {error}") from error
        if (parse := self._delivery.parse) is not None:
            parsed = []
            for record, place in records:
                try:
                    parsed.append(parse(record))
                except Exception as error:
                    error.add_note(f"raised by parse= for {self._place(place)}")
                    raise
            return parsed[0] if single else default_collate(parsed)
        return data[0] if single else data

    def _place(self, place: int) -> str:
        path = self._source.paths[place >> PLACE_BITS]
        return f"{path}: the record at byte {place & ((1 << PLACE_BITS) - 1)}"


def _check_number(name: str, value: Any, least: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r}: must be a whole number, {least} or more{otherwise}")


def _digest(paths: Sequence[Path]) -> str:
    """Returns a digest of the files' names and sizes; not of their folder, which may differ between hosts."""
    text = "\n".join(f"{path.name} {path.stat().st_size}" for path in paths)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
