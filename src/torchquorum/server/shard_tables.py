"""The tables of one shard: gradients of rows as they arrive, updates as the log says, rows for those who ask.

Owned by the shard. What always holds: the one thread that owns the shard gathers and scatters, so the rows of an answer are of one
version and none is half written; tables change with an `Apply` of the log and with nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchquorum.formats.checkpoint_manifest import Manifest, StoredTable
from torchquorum.formats.row_file import KEYS, REMOVED, SIGHTED, STAMPS, TIMES, VALUES
from torchquorum.formats.stored_tensors import StoredTensors
from torchquorum.memory.key_index import Keys
from torchquorum.placement.layout import CONSTANT
from torchquorum.rules.quorum import Key
from torchquorum.update.table import RowMoment, TablePart, mean_rows
from torchquorum.update.table_keys import shard_of
from torchquorum.update.table_snapshot import TableSnapshot
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import cut_parts, flat_bytes, frame_tensor, parts_bytes, tensor_frame
from torchquorum.wire.key_frames import unpack_keys
from torchquorum.wire.messages import RowPart
from torchquorum.wire.plan import Plan, TableSpec
from torchquorum.wire.settings import Settings, decode


@dataclass(slots=True)
class RowGradient:
    """What a gradient says of one table's rows on this shard.

    While `borrowed` it lies in the receive buffer of its connection, or in its worker's memory.
    """

    keys: Keys
    rows: torch.Tensor
    borrowed: bool = True


@dataclass(slots=True)
class RowUpdate:
    """The mean gradient of a table's rows that made a version, as the journal keeps it."""

    table: int
    keys: Keys
    mean: torch.Tensor
    seen: npt.NDArray[np.int64]


class ShardTables:
    """The tables of one shard.

    Args:
        plan: The run's plan.
        index: Which shard.
    """

    def __init__(self, plan: Plan, index: int) -> None:
        self._index, self._num_shards = index, plan.num_shards
        self.tables = [TablePart(spec, index, plan.num_shards) for spec in plan.tables]
        self._pending: dict[Key, dict[int, RowGradient]] = {}
        self._options: tuple[Settings, list[dict[str, Any]]] = ([], [])
        for table, options in zip(self.tables, self._options_of(plan.optimizer.groups), strict=True):
            table.begin(options)

    def __len__(self) -> int:
        return len(self.tables)

    def begin_with(self, frames: Sequence[Frame]) -> None:
        """Takes the rows that the chief's modules hold: in one frame, of each fixed table those of this shard, in the order of keys."""
        fixed = [table for table in self.tables if table.spec.is_fixed]
        if len(frames) != bool(fixed):
            raise ValueError(f"{len(frames)} frames for {len(fixed)} tables")
        keys = [keys_of_shard(table.spec, self._index, self._num_shards) for table in fixed]
        sizes = [_row_bytes(table.spec, len(own)) for table, own in zip(fixed, keys, strict=True)]
        for table, own, part in zip(fixed, keys, cut_parts(frames[0], sizes) if frames else [], strict=True):
            table.load(own, {VALUES: _rows(table.spec, part, len(own))})

    # -- gradients ----------------------------------------------------------------------------------------------------

    def store(self, key: Key, parts: Sequence[RowPart], frames: Sequence[Frame]) -> None:
        """Keeps what a gradient says of rows, until the log says what becomes of it.

        Raises:
            ValueError: It does not fit the tables.
        """
        if len(frames) != bool(parts):
            raise ValueError(f"{len(frames)} frames for {len(parts)} parts of tables")
        found: dict[int, RowGradient] = {}
        pieces = cut_parts(frames[0], self._sizes(parts)) if parts else []
        for part, own, rows in zip(parts, pieces[::2], pieces[1::2], strict=True):
            table, keys = self.tables[part.table], _keys(own, part)
            if part.table in found or bool((keys[1:] <= keys[:-1]).any()):
                raise ValueError(f"keys of table {table.spec.name} are not in order, each once")
            table.keys.check(keys)
            found[part.table] = RowGradient(keys, _rows(table.spec, rows, part.count))
        self._pending[key] = found

    def _sizes(self, parts: Sequence[RowPart]) -> list[int]:
        """Returns of how many bytes the keys and the rows of each part are.

        Raises:
            ValueError: There is no such table.
        """
        sizes = list[int]()
        for part in parts:
            if not 0 <= part.table < len(self.tables) or part.count < 0 or part.packed < 0:
                raise ValueError(f"rows of table {part.table}, which is not there")
            sizes += [part.packed or part.count * 8, _row_bytes(self.tables[part.table].spec, part.count)]
        return sizes

    def size_bytes(self, parts: Sequence[RowPart]) -> int:
        """Returns how large a frame with these parts is."""
        return parts_bytes(self._sizes(parts))

    def copy_borrowed(self, worker: int) -> None:
        """A worker goes on while its gradient still waits: what lies in a receive buffer, or in its memory, is copied."""
        for key, parts in self._pending.items():
            if key.worker == worker:
                for part in parts.values():
                    if part.borrowed:
                        part.keys, part.rows, part.borrowed = part.keys.copy(), part.rows.clone(), False

    def drop(self, keys: Iterable[Key]) -> None:
        """These gradients will not be used."""
        for key in keys:
            self._pending.pop(key, None)

    def gradient_of(self, key: Key) -> list[tuple[str, Keys, torch.Tensor]]:
        """Returns what a gradient that waits says of rows: by table, which, and of each its gradient."""
        return [(self.tables[k].spec.name, part.keys, part.rows) for k, part in self._pending.get(key, {}).items()]

    def mean(self, keys: Sequence[Key]) -> list[RowUpdate]:
        """Takes the gradients that make an update; returns the mean of each table's rows that some of them touch."""
        parts = [self._pending.pop(key, {}) for key in keys]
        updates: list[RowUpdate] = []
        for k, table in enumerate(self.tables):
            given = [(part[k].keys, part[k].rows) for part in parts if k in part]
            if given:
                updates.append(RowUpdate(k, *mean_rows(given, len(keys), touching=table.spec.touching)))
        return updates

    def apply(self, updates: Sequence[RowUpdate], version: int, settings: Settings, rates: Sequence[float]) -> None:
        """Makes a version: of the rows that were touched, with these options and rates."""
        options = self._options_of(settings)
        for update in updates:
            table = self.tables[update.table]
            chosen = options[update.table]
            if table.spec.group != CONSTANT:
                chosen = {**chosen, "lr": rates[table.spec.group]}
            table.apply(update.keys, update.mean, RowMoment(version, chosen), update.seen)

    def read_updates(self, rows: Sequence[tuple[int, int]], payload: Frame) -> list[RowUpdate]:
        """Returns the updates of rows that a record of the journal has, from the bytes that `with_rows` added."""
        found, at = list[RowUpdate](), 0

        def take(size_bytes: int) -> torch.Tensor:
            nonlocal at
            at += size_bytes
            return frame_tensor(payload[at - size_bytes : at], size_bytes)

        for table, count in rows:
            spec = self.tables[table].spec
            dtype: torch.dtype = getattr(torch, spec.dtype)
            keys = take(count * 8).view(torch.int64).numpy()
            mean = take(count * spec.dim * dtype.itemsize).view(dtype).view(count, spec.dim)
            found.append(RowUpdate(table, keys, mean, take(count * 8).view(torch.int64).numpy()))
        return found

    def evict(self, version: int, time: float) -> int:
        """Removes the rows whose time is over; returns how many."""
        return sum(table.evict(version, time) for table in self.tables)

    @property
    def rows(self) -> int:
        """Returns how many rows there are."""
        return sum(table.size for table in self.tables)

    def snapshot(self, files: Sequence[str], since: int = -1) -> tuple[list[TableSnapshot], list[StoredTable]]:
        """Returns the rows as they are now, to be read while the tables go on, and what a checkpoint says of them.

        Args:
            files: Those that the checkpoint has them in, the last of which is to be written.
            since: Only those updated after this version; all by default.
        """
        rows, stored = [table.snapshot(since) for table in self.tables], list[StoredTable]()
        for table, snapshot in zip(self.tables, rows, strict=True):
            spec = table.spec
            stored.append(
                StoredTable(
                    name=spec.name,
                    files=list(files),
                    rows=snapshot.rows,
                    dim=spec.dim,
                    dtype=spec.dtype,
                    optimizer=spec.optimizer,
                    scalars=table.scalars(),
                )
            )
        return rows, stored

    def restore(self, reader: StoredTensors, manifest: Manifest) -> None:
        """Takes the rows that are here from a checkpoint, whatever the number of ps tasks it was saved with."""
        for table in self.tables:
            stored = [part for part in manifest.tables if part.name == table.spec.name]
            for part in stored:
                for file in part.files:
                    for chunk in reader.rows(file, part.name):
                        _take(table, chunk, is_last=file == part.files[-1])
            table.restore([part.scalars for part in stored])

    def _options_of(self, settings: Settings) -> list[dict[str, Any]]:
        """Returns each table's options, of its parameter group or its own."""
        if self._options[0] is not settings or not self._options[1]:
            found = []
            for table in self.tables:
                spec = table.spec
                given: Mapping[str, Any] = settings[spec.group] if spec.group != CONSTANT else spec.options
                found.append(table.kernel.options({name: decode(value) for name, value in given.items()}))
            self._options = settings, found
        return self._options[1]

    # -- rows ---------------------------------------------------------------------------------------------------------

    def evicted(self, table: int) -> Frame:
        """Returns the keys of a table that went last, as a frame."""
        if not 0 <= table < len(self.tables):
            raise ValueError(f"keys of table {table}, which is not there")
        return self.tables[table].age.told.tobytes()

    def check(self, table: int, frame: Frame) -> None:
        """Raises ValueError if there is no such table, or it has no such keys."""
        if not 0 <= table < len(self.tables) or len(frame) % 8:
            raise ValueError(f"rows of table {table}, which is not there, for {len(frame)} bytes of keys")
        self.tables[table].keys.check(read_keys(frame, len(frame) // 8))

    def changed(
        self, table: int, frame: Frame, version: int, evicted: int
    ) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Returns what of some rows has changed since a version at which so many had gone: their places among the keys, and the rows."""
        return self.tables[table].changed(read_keys(frame, len(frame) // 8), version, evicted)

    def gather(self, table: int, frame: Frame, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns rows as they are now, in memory for so many, if that is given."""
        spec, count = self.tables[table].spec, len(frame) // 8
        return self.tables[table].gather(read_keys(frame, count), _rows(spec, out, count) if out is not None else None)

    def row_bytes(self, table: int) -> int:
        """Returns how large a row is.

        Raises:
            ValueError: There is no such table.
        """
        if not 0 <= table < len(self.tables):
            raise ValueError(f"rows of table {table}, which is not there")
        return _row_bytes(self.tables[table].spec, 1)


def with_rows(payload: npt.NDArray[np.uint8], updates: Sequence[RowUpdate]) -> npt.NDArray[np.uint8]:
    """Returns the bytes of a record of the journal: those of the variables, then the updates of rows."""
    if not updates:
        return payload
    parts = [payload]
    for update in updates:
        mean = flat_bytes(update.mean).numpy()
        parts += [np.ascontiguousarray(update.keys).view(np.uint8), mean, update.seen.view(np.uint8)]
    whole = np.concatenate(parts)
    whole.flags.writeable = False
    return whole


def keys_of_shard(spec: TableSpec, index: int, num_shards: int) -> Keys:
    """Returns the keys of a fixed table that a shard has, in order."""
    keys = np.arange(spec.rows, dtype=np.int64)
    return keys if num_shards == 1 else keys[shard_of(keys, num_shards) == index]


def read_keys(frame: Frame, count: int) -> Keys:
    """Returns the keys in a frame.

    Raises:
        ValueError: There are not so many.
    """
    return frame_tensor(frame, count * 8).view(torch.int64).numpy()


def _keys(data: torch.Tensor, part: RowPart) -> Keys:
    return unpack_keys(tensor_frame(data), part.count) if part.packed else data.view(torch.int64).numpy()


def _take(table: TablePart, chunk: dict[str, torch.Tensor], *, is_last: bool) -> None:
    if REMOVED in chunk:
        table.remove(chunk[REMOVED].numpy())
    if SIGHTED in chunk and is_last:  # each file has all of them
        table.load_sightings(chunk[SIGHTED].numpy(), chunk[TIMES].numpy())
    table.load(chunk[KEYS].numpy(), chunk, chunk[STAMPS].numpy())


def _row_bytes(spec: TableSpec, count: int) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return count * spec.dim * dtype.itemsize


def _rows(spec: TableSpec, part: torch.Tensor, count: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return part.view(dtype).view(count, spec.dim)
