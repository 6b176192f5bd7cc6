"""`tq.TFRecordDataset`: TFRecord files as batches for a training loop, with a position that a checkpoint can hold.

Called by users' programs, from one thread. Records are shared out, shuffled, repeated, batched, parsed and read ahead, in
this order, as in tf.data. What always holds: the order of the records is a pure function of the arguments; the position is
that of what the loop was given, whatever has been read ahead; an error is raised where the loop asks for its next batch,
and names file and offset.
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
from torchquorum.data.record_stream import Reading, Record, RecordStream
from torchquorum.data.shares import PLACE_BITS, Share, check_share, find_files
from torchquorum.errors import ConfigError, DataError
from torchquorum.formats.compression import parse_compression

Position = dict[str, int]


@dataclass(frozen=True, slots=True)
class _Making:
    """How records become what the loop gets."""

    parse: Specs | Callable[[bytes], Any] | None
    transform: Callable[[Any], Any] | None
    batch_size: int | None
    drop_remainder: bool


class TFRecordDataset(IterableDataset[Any]):
    """The records of TFRecord files, parsed and batched, as a torch IterableDataset.

    Each pass over it, `for batch in dataset`, goes through `repeat` epochs; the next pass goes on with the next epoch, so
    that it comes in another order. In a DataLoader use `batch_size=None` there and the batch size here; its processes
    divide the share among them.

    Args:
        files: A path, a pattern such as "data/train-*", or a list of these. A pattern's files come in the order of their
            names.
        features: What to take from each tf.train.Example: names with `tq.FixedLenFeature`, `tq.VarLenFeature` or
            `tq.RawFeature`. A batch is then a dict of tensors.
        parse: Instead of `features`, a function from a record's bytes to anything that torch's default_collate can make
            batches of. With neither, records come as bytes.
        transform: A function of what would be delivered, the whole batch; what it returns is delivered instead.
        shuffle: The size of the shuffle buffer in records, 0 for the order of the files.
        shuffle_files: Whether every epoch reads the files in an order of its own.
        repeat: How many epochs a pass has, None for no end. Batches may reach from one epoch into the next.
        batch_size: Records per batch; None delivers them one by one.
        drop_remainder: Whether a last, smaller batch is left out.
        prefetch: How many batches a thread reads ahead, 0 for no thread.
        seed: Of the order; the same for all workers.
        share: (index, count): read this part of the records, for instance (task.index, task.num_workers). By whole files
            if there are as many of them as workers or more, otherwise by record.
        compression: "GZIP", "ZLIB", None for none, or "auto" to tell from each file.
        verify: Whether checksums of the data are compared.

    Raises:
        ConfigError: An argument is not allowed, or two contradict each other.
        DataError: A file is not there.
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
        _check_number("shuffle", shuffle, 0)
        _check_number("seed", seed, 0)
        _check_number("prefetch", prefetch, 0)
        if repeat is not None:
            _check_number("repeat", repeat, 1, "; None goes on for ever")
        if batch_size is not None:
            _check_number("batch_size", batch_size, 1, "; None delivers records one by one")
        elif drop_remainder:
            raise ConfigError("drop_remainder=True without batch_size: there are no batches; give a batch_size")
        if features is not None and parse is not None:
            raise ConfigError("features and parse: give one of them; transform= changes what features= has parsed")
        for name, function in (("parse", parse), ("transform", transform)):
            if function is not None and not callable(function):
                raise ConfigError(f"{name}={function!r}: must be a function")
        parse_compression(compression)
        index, count = check_share(share)
        paths = find_files(files)
        whole = Share(tuple(range(len(paths))))
        self._reading = Reading(
            paths, whole.divide(index, count), f"{index}/{count}", seed, shuffle, shuffle_files, compression, verify
        )
        self._making = _Making(
            check_specs(features) if features is not None else parse, transform, batch_size, drop_remainder
        )
        self._repeat, self._prefetch = repeat, prefetch
        self._identity = {
            "files": _digest(paths),
            "share": f"{index}/{count}",
            "shuffle": shuffle,
            "shuffle_files": shuffle_files,
            "seed": seed,
        }
        self._position: Position = {"first_epoch": 0, "epoch": 0, "taken": 0}
        self._next_epoch = 0
        self._jump: Position | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Returns the files, of all shares, in order."""
        return self._reading.paths

    @property
    def epoch(self) -> int:
        """Returns the epoch, from 0, of the record that comes next; an epoch ends when the next one's record has come."""
        return self._position["epoch"]

    def set_epoch(self, epoch: int) -> None:
        """Says which pass is the next, from 0; for a DataLoader, whose processes always start from a fresh copy.

        Raises:
            ConfigError: It is no whole number, 0 or more.
        """
        _check_number("epoch", epoch, 0)
        first = epoch * (self._repeat or 1)
        self._next_epoch, self._jump = first, None
        self._position = {"first_epoch": first, "epoch": first, "taken": 0}

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of what comes next, and what must be equal for it to lead to the same records.

        JSON can hold it. The batch size is not part of it: a run may go on with another one.
        """
        return {**self._position, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position, also in the middle of a pass: the next batch is the one that would have come there.

        Raises:
            ConfigError: The state has no valid position, or is one in other files or in another order.
        """
        for name, value in self._identity.items():
            if name in state and state[name] != value:
                what = "other files (their names or sizes differ)" if name == "files" else f"{name}={state[name]!r}"
                raise ConfigError(
                    f"{name}={value!r}: the saved position is in {what}, and does not lead to the same records; use what "
                    "it was saved with, or start the data from the beginning"
                )
        position: dict[str, Any] = {name: state.get(name) for name in ("first_epoch", "epoch", "taken")}
        for name, value in position.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}={value!r} in the saved position: must be a whole number, 0 or more")
        self._jump = self._position = position

    def _start(self) -> tuple[Position, Iterator[Any], Any]:
        """Begins a pass, at the position that was loaded if one was; returns that, what to iterate over and what to close."""
        reading, loader = self._reading, get_worker_info()
        if loader is not None:
            if self._jump is not None:
                raise ConfigError(
                    "the processes of a DataLoader cannot take up a position; use num_workers=0, or give "
                    "tq.Prefetcher(loader) a position instead"
                )
            part = reading.share.divide(loader.id, loader.num_workers)
            name = f"{reading.name} {loader.id}/{loader.num_workers}"
            reading = replace(reading, share=part, name=name)
        jump, self._jump = self._jump, None
        first = jump["first_epoch"] if jump is not None else self._next_epoch
        position = jump if jump is not None else {"first_epoch": first, "epoch": first, "taken": 0}
        self._next_epoch = first + (self._repeat or 1)
        elements = _Elements(reading, self._making, position, self._repeat)
        if self._prefetch:
            ahead = Prefetcher(elements, self._prefetch)
            return position, ahead, ahead
        return position, elements, elements


class _Pass:
    """One pass of the loop over a dataset: it tells the dataset what has been delivered, and follows where it is sent."""

    def __init__(self, dataset: TFRecordDataset) -> None:
        self._dataset = dataset
        self._elements: Any = None
        self._over = False

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        dataset = self._dataset
        if self._elements is None or dataset._jump is not None:
            if self._over and dataset._jump is None:
                raise StopIteration
            self._close()
            dataset._position, self._elements, self._closing = dataset._start()
            self._over = False
        try:
            element = next(self._elements)
        except StopIteration:
            self._over = True
            self._close()
            following = dataset._next_epoch
            dataset._position = {"first_epoch": following, "epoch": following, "taken": 0}
            raise
        dataset._position = self._elements.state_dict()
        return element

    def state_dict(self) -> dict[str, Any]:
        """Returns the dataset's position."""
        return self._dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sends the dataset, and so this pass, to a position."""
        self._dataset.load_state_dict(state)

    def _close(self) -> None:
        if self._elements is not None:
            self._elements = None
            self._closing.close()


class _Elements:
    """What a pass delivers, one after another, with positions. Owned by one thread, that of the reader if there is one."""

    def __init__(self, reading: Reading, making: _Making, position: Position, repeat: int | None) -> None:
        self._reading, self._making, self._repeat = reading, making, repeat
        self._parser = BatchParser(making.parse) if isinstance(making.parse, Mapping) else None
        self.load_state_dict(position)

    def __iter__(self) -> _Elements:
        return self

    def __next__(self) -> Any:
        making = self._making
        records = self._stream.take(making.batch_size or 1)
        if not records or (making.drop_remainder and len(records) < (making.batch_size or 1)):
            self._stream.close()
            raise StopIteration
        element = self._make(records)
        return element if making.transform is None else making.transform(element)

    def state_dict(self) -> Position:
        """Returns the position of the next record."""
        return {"first_epoch": self._first, "epoch": self._stream.epoch, "taken": self._stream.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position."""
        self._first = state["first_epoch"]
        end = None if self._repeat is None else self._first + self._repeat
        self._stream = RecordStream(self._reading, state["epoch"], state["taken"], end)

    def close(self) -> None:
        """Closes the open file."""
        self._stream.close()

    def _make(self, records: list[Record]) -> Any:
        single = self._making.batch_size is None
        data = [record for record, _ in records]
        if self._parser is not None:
            try:
                return self._parser.parse_one(data[0]) if single else self._parser.parse(data)
            except RowError as error:
                raise DataError(f"{self._place(records[error.row][1])}: {error}") from error
        if callable(self._making.parse):
            parsed = []
            for record, place in records:
                try:
                    parsed.append(self._making.parse(record))
                except Exception as error:
                    error.add_note(f"raised by parse= for {self._place(place)}")
                    raise
            return parsed[0] if single else default_collate(parsed)
        return data[0] if single else data

    def _place(self, place: int) -> str:
        path = self._reading.paths[place >> PLACE_BITS]
        return f"{path}: the record at byte {place & ((1 << PLACE_BITS) - 1)}"


def _check_number(name: str, value: Any, least: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r}: must be a whole number, {least} or more{otherwise}")


def _digest(paths: Sequence[Path]) -> str:
    """Returns a fingerprint of the files' names and sizes; not of their folder, which may differ between hosts."""
    text = "\n".join(f"{path.name} {path.stat().st_size}" for path in paths)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
