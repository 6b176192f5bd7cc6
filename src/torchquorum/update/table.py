"""One shard's part of a table: its rows in flat memory that grows in place, with their optimizer's state, found by key.

Owned by the shard. What always holds: a row that is pulled before it was ever updated costs nothing, it is what it would begin with;
only an update makes, changes or counts rows, and only an eviction of the log removes some, so shards that follow one log agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchquorum.formats.row_file import VALUES
from torchquorum.memory.growing import Growing
from torchquorum.memory.key_index import KeyIndex, Keys, Positions, mix
from torchquorum.update.row_inits import initial_rows
from torchquorum.update.row_kernels import ONE, RowKernel, kernel_of
from torchquorum.update.table_snapshot import TableSnapshot
from torchquorum.wire.plan import TableSpec

SHARD_SALT = 1
CHUNK_ROWS = 1 << 16
RECENT = 8  # pulls whose places are remembered until their gradients come
MOST_TOLD = 100_000  # evicted keys that are remembered for `table.evicted()`
NUMPY = {"float32": np.float32, "float64": np.float64}


def shard_of(keys: Keys, num_shards: int) -> Positions:
    """Returns the shard of each key: by a hash, so that keys of any pattern are spread evenly."""
    if num_shards == 1:
        return np.zeros(len(keys), np.int64)
    return ((mix(keys, SHARD_SALT) >> np.uint64(33)) * np.uint64(num_shards) >> np.uint64(31)).astype(np.int64)


@dataclass(slots=True)
class Moment:
    """When rows are updated, and with what: the version that is made, the options of their optimizer."""

    version: int
    options: Mapping[str, Any]


class Column:
    """Something that every row has: the values, or a state; as rows of bytes it is gathered and scattered."""

    def __init__(self, dtype: npt.DTypeLike, width: int | None, most: int | None = None) -> None:
        wide = 1 if width is None else width
        self.memory = Growing(dtype, None if most is None else most * wide)
        whole = len(self.memory) // wide
        self.array = self.memory.array if width is None else self.memory.array[: whole * wide].reshape(whole, wide)
        self.rows = torch.from_numpy(self.array)
        self._width = width
        self._scratch = self.rows.new_empty((0, *self.rows.shape[1:]))
        size = self.array.itemsize * wide
        self._as_bytes = self._view(self.array, size)
        self._size = size

    def _view(self, array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
        return array.view(np.dtype((np.void, size))).reshape(-1) if self._width is not None else array

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns copies of rows, good until the next call."""
        count = len(positions)
        if len(self._scratch) < count:
            self._scratch = self.rows.new_empty((count + count // 4, *self.rows.shape[1:]))
        return torch.index_select(self.rows, 0, positions, out=self._scratch[:count])

    def put(self, positions: Positions, rows: torch.Tensor) -> None:
        """Writes rows."""
        given = np.ascontiguousarray(rows.numpy())
        np.put(self._as_bytes, positions, self._view(given, self._size))


class Table:
    """A table's rows on one shard.

    Args:
        spec: The table.
        shard: Which ps task this is.
        num_shards: How many there are.

    Attributes:
        count: How many updates have touched the table, on any shard.
        pulled: How many rows were asked for.
        found: How many of those were there.
        evicted: How many rows were removed.
    """

    def __init__(self, spec: TableSpec, shard: int = 0, num_shards: int = 1) -> None:
        self.spec, self.shard, self.num_shards = spec, shard, num_shards
        self.kernel: RowKernel = kernel_of(spec.optimizer, spec.name)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.count = self.pulled = self.found = self.evicted = 0
        self._fixed = spec.is_fixed
        self._all: Keys | None = None
        most = None
        if self._fixed:
            most = spec.rows
            if num_shards > 1:  # which keys are here, and where: positions in the order of keys
                shards = shard_of(np.arange(spec.rows, dtype=np.int64), num_shards)
                self._all = np.flatnonzero(shards == shard)
                self._where = np.full(spec.rows, -1, np.int32)
                self._where[self._all] = np.arange(len(self._all), dtype=np.int32)
                most = len(self._all)
        self.size = most or 0  # rows that are there
        self._end = self.size  # the first position that was never used
        dtype = NUMPY[spec.dtype]
        self.values = Column(dtype, spec.dim, most)
        self.states = {
            name: Column(dtype, None if kind == ONE else spec.dim, most) for name, kind in self.kernel.states.items()
        }
        self._first_states = dict.fromkeys(self.states, 0.0)
        self.stamps = Growing(np.int32, most)  # the version of a row's last update
        self._index = None if self._fixed else KeyIndex()
        self._keys = None if self._fixed else Growing(np.int64)
        self._free = np.empty(0, np.int64)
        self._recent: deque[tuple[Keys, Positions, int]] = deque(maxlen=RECENT)
        self._sightings: dict[int, int] = {}
        self._version = 0
        self._marks: list[tuple[int, float]] = []  # which version was there at a time
        self.told: list[int] = []  # keys that were evicted last
        self._gone: list[tuple[int, Keys]] = []  # which keys went, and at which version, since the last checkpoint
        self._saved = False
        self._snapshot: TableSnapshot | None = None

    @property
    def size_bytes(self) -> int:
        """Returns how much memory the rows take, with all that belongs to them."""
        per_row = self.spec.dim * self.values.array.itemsize + 4
        per_row += sum(c.array.itemsize * (1 if c.array.ndim == 1 else self.spec.dim) for c in self.states.values())
        index = self._index.size_bytes if self._index is not None else 0
        return self._end * (per_row + (0 if self._fixed else 8)) + index + len(self._free) * 8

    def begin(self, options: Mapping[str, Any]) -> None:
        """Says what the optimizer's options are, before the first update: some states begin with one of them."""
        whole = self.kernel.options(options)
        for name, column in self.states.items():
            self._first_states[name] = first = self.kernel.initial(whole, name)
            if self._fixed and first:
                column.array[: self.size] = first

    # -- rows ---------------------------------------------------------------------------------------------------------

    def find(self, keys: Keys) -> Positions:
        """Returns where the rows of keys are, -1 for those that are not there."""
        if self._index is not None:
            return self._index.find(keys)
        return keys if self._all is None else self._where[keys].astype(np.int64)

    def keys_at(self, positions: Positions) -> Keys:
        """Returns the keys of rows that are there."""
        if self._keys is not None:
            return self._keys.array[positions]
        return positions if self._all is None else self._all[positions]

    def _find_again(self, keys: Keys) -> Positions:
        """Returns where the rows of keys are; those of a recent pull are known, but for the ones that were not there."""
        for asked, positions, removals in self._recent:
            if removals == self.evicted and len(asked) == len(keys) and np.array_equal(asked, keys):
                missing = np.flatnonzero(positions < 0)
                positions[missing] = self.find(keys[missing])
                return positions
        return self.find(keys)

    def gather(self, keys: Keys, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns rows as they are now; those that are not there as they would begin.

        Args:
            keys: Which, each of this shard.
            out: Where to write them.

        Raises:
            ValueError: A key is not in the table.
        """
        self.check(keys)
        positions = self.find(keys)
        if self._index is not None:
            self._recent.append((keys, positions, self.evicted))
        self.pulled += len(keys)
        if self._index is None:
            self.found += len(keys)
            return torch.index_select(self.values.rows, 0, torch.from_numpy(positions), out=out)
        there = positions >= 0
        count = int(np.count_nonzero(there))
        self.found += count
        if count == len(keys):
            return torch.index_select(self.values.rows, 0, torch.from_numpy(positions), out=out)
        rows = torch.empty((len(keys), self.spec.dim), dtype=self.dtype) if out is None else out
        known, new = np.flatnonzero(there), np.flatnonzero(~there)
        rows[torch.from_numpy(known)] = self.values.rows.index_select(0, torch.from_numpy(positions[known]))
        rows[torch.from_numpy(new)] = self._initial(keys[new])
        return rows

    def check(self, keys: Keys) -> None:
        """Raises ValueError if a key is not in the table, or not of this shard."""
        if not len(keys):
            return
        if self.spec.rows and (int(keys.min()) < 0 or int(keys.max()) >= self.spec.rows):
            raise ValueError(f"keys of table {self.spec.name} are not all from 0 to {self.spec.rows - 1}")
        if self._all is not None and bool((self._where[keys] < 0).any()):
            raise ValueError(f"keys of table {self.spec.name} are of another shard")

    def _initial(self, keys: Keys) -> torch.Tensor:
        init = self.spec.init
        return initial_rows(init.name, init.numbers, self.spec.seed, keys, self.spec.dim, self.dtype)

    def _make(self, keys: Keys) -> Positions:
        """Makes rows that are not there; returns where they are."""
        assert self._index is not None and self._keys is not None
        again = self._free[len(self._free) - min(len(self._free), len(keys)) :]
        self._free = self._free[: len(self._free) - len(again)]
        fresh = len(keys) - len(again)
        positions = np.concatenate([again, np.arange(self._end, self._end + fresh)])
        if self._end + fresh > min(len(self.values.array), (1 << 31) - 1):
            raise MemoryError(f"table {self.spec.name} has {self.size} rows on this ps task, and no room for more")
        self._end += fresh
        self.size += len(keys)
        self._keep(positions)
        self._index.insert(keys, positions)
        self._keys.array[positions] = keys
        self.values.put(positions, self._initial(keys))
        for name, column in self.states.items():
            column.array[positions] = self._first_states[name]
        return positions

    def apply(
        self, keys: Keys, gradient: torch.Tensor, moment: Moment, seen: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Makes one update.

        Args:
            keys: The rows it touches, each once; there may be none on this shard.
            gradient: Their mean gradient.
            moment: When, and with which options.
            seen: How many gradients have touched each of them; one by default.
        """
        self.count += 1
        if not len(keys):
            return
        positions = self._find_again(keys)
        if self._index is not None and len(new := np.flatnonzero(positions < 0)):
            if self.spec.admit > 1:
                new = new[self._admitted(keys[new], None if seen is None else seen[new])]
            if len(new):
                positions[new] = self._make(keys[new])
            kept = positions >= 0
            if not kept.all():
                positions, gradient = positions[kept], gradient[torch.from_numpy(kept)]
        self._keep(positions)
        where = torch.from_numpy(positions)
        rows = self.values.take(where)
        states = {name: column.take(where) for name, column in self.states.items()}
        self.kernel.step(moment.options, self.count, rows, gradient, states)
        self.values.put(positions, rows)
        for name, column in self.states.items():
            column.put(positions, states[name])
        self.stamps.array[positions] = moment.version

    def _keep(self, positions: Positions) -> None:
        """Rows are about to change: one that is being saved is saved as it was."""
        if self._snapshot is not None:
            self._snapshot.keep(positions)
            if self._snapshot.done:
                self._snapshot = None

    def _admitted(self, keys: Keys, seen: npt.NDArray[np.int64] | None) -> npt.NDArray[np.bool_]:
        """Counts sightings of keys that have no row; returns which are to have one now."""
        admitted = np.zeros(len(keys), np.bool_)
        for at, key in enumerate(keys.tolist()):  # those without a row only
            total = self._sightings.get(key, 0) + (1 if seen is None else int(seen[at]))
            if total >= self.spec.admit:
                admitted[at] = True
                self._sightings.pop(key, None)
            else:
                self._sightings[key] = total
        return admitted

    # -- eviction -----------------------------------------------------------------------------------------------------

    @property
    def share(self) -> int:
        """Returns how many rows there may be on this shard; 0 for no limit."""
        return -(-self.spec.capacity // self.num_shards) if self.spec.capacity else 0

    def evict(self, version: int, time: float) -> int:
        """Removes the rows that have not been updated for too long, and the least recently updated of too many.

        Args:
            version: The version at this place of the log.
            time: The time that the log has for it.

        Returns:
            How many were removed.
        """
        if self._index is None or not (self.spec.ttl_steps or self.spec.ttl_s or self.share):
            return 0
        self._version = version
        last = version - self.spec.ttl_steps - 1 if self.spec.ttl_steps else -1
        if self.spec.ttl_s:
            old = [v for v, at in self._marks if at <= time - self.spec.ttl_s]
            last = max(last, old[-1] if old else -1)
            self._marks = [mark for mark in self._marks if mark[0] >= (old[-1] if old else -1)]
            self._marks.append((version, time))
        gone = self._not_since(last) if last >= 0 else np.empty(0, np.int64)
        self._remove(gone)
        if self.share and self.size > self.share:
            live = np.flatnonzero(self.live_mask())
            over = self.size - (self.share - self.share // 64)
            stamps = self.stamps.array[live].astype(np.int64)
            # The oldest first; of the same age the smaller key, so that the order of positions does not matter.
            bound = np.partition(stamps, over - 1)[over - 1]
            older, same = live[stamps < bound], live[stamps == bound]
            same = same[np.argsort(self.keys_at(same), kind="stable")]
            least = np.concatenate([older, same[: over - len(older)]])
            self._remove(least)
            gone = np.concatenate([gone, least])
        return len(gone)

    def _not_since(self, version: int) -> Positions:
        old = self.stamps.array[: self._end] <= version
        old[self._free] = False
        return np.flatnonzero(old)

    def _remove(self, positions: Positions) -> None:
        if not len(positions):
            return
        assert self._index is not None
        keys = self.keys_at(positions)
        keys = keys[np.lexsort((keys, self.stamps.array[positions]))]
        self._index.remove(keys)
        self._free = np.concatenate([self._free, positions])
        self.size -= len(positions)
        self.evicted += len(positions)
        if self._saved:
            self._gone.append((self._version, keys))
        self.told = [*self.told, *keys.tolist()][-MOST_TOLD:]

    # -- to disk and back ---------------------------------------------------------------------------------------------

    def live_mask(self) -> npt.NDArray[np.bool_]:
        """Returns, for each position that was ever used, whether a row is there."""
        live = np.ones(self._end, np.bool_)
        live[self._free] = False
        return live

    def sightings(self) -> tuple[Keys, npt.NDArray[np.int64]]:
        """Returns the keys that were seen and have no row yet, and how often."""
        return np.array(list(self._sightings), np.int64), np.array(list(self._sightings.values()), np.int64)

    def snapshot(self, since: int = -1) -> TableSnapshot:
        """Returns the rows as they are now, to be read while the table goes on; only those updated after a version, with `since`."""
        self._saved = True
        gone = [keys for version, keys in self._gone if version > since]
        self._snapshot = TableSnapshot(self, since, np.unique(np.concatenate(gone)) if gone else None)
        return self._snapshot

    def forget_gone(self, version: int) -> None:
        """A checkpoint of this version is there: which keys went before is known from it."""
        self._gone = [(at, keys) for at, keys in self._gone if at > version]

    def load(
        self, keys: Keys, columns: Mapping[str, torch.Tensor], stamps: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Takes rows from a checkpoint, or those that the chief's module holds; others than this shard's are passed over.

        Args:
            keys: Which rows; in a chain of checkpoints a later one takes the place of an earlier.
            columns: `rows`, and the states by name.
            stamps: The version of each row's last update.
        """
        mine = np.flatnonzero(shard_of(keys, self.num_shards) == self.shard)
        if not len(mine):
            return
        keys = keys[mine]
        positions = self.find(keys)
        if self._index is not None and len(new := np.flatnonzero(positions < 0)):
            positions[new] = self._make(keys[new])
        where = torch.from_numpy(mine)
        self.values.put(positions, columns[VALUES].index_select(0, where))
        for name, column in self.states.items():
            if name in columns:
                column.put(positions, columns[name].index_select(0, where))
        self.stamps.array[positions] = 0 if stamps is None else stamps[mine]

    def remove(self, keys: Keys) -> None:
        """Removes the rows of those of these keys that are here and have one, as a checkpoint says."""
        positions = self.find(keys)
        evicted, told = self.evicted, self.told
        self._remove(positions[positions >= 0])
        self.evicted, self.told, self._gone = evicted, told, []

    def load_sightings(self, keys: Keys, times: npt.NDArray[np.int64]) -> None:
        """Takes the sightings of keys without a row from a checkpoint."""
        mine = shard_of(keys, self.num_shards) == self.shard
        self._sightings.update(zip(keys[mine].tolist(), times[mine].tolist(), strict=True))

    def scalars(self) -> dict[str, Any]:
        """Returns what else a checkpoint has of the table."""
        kept = {"count": self.count, "evicted": self.evicted, "marks": [list(mark) for mark in self._marks]}
        return {**kept, "rows": self.size, "pulled": self.pulled, "found": self.found, "size_bytes": self.size_bytes}

    def restore(self, scalars: Sequence[Mapping[str, Any]]) -> None:
        """Takes what `scalars` returned on all shards of a checkpoint."""
        if scalars:
            self.count = max(int(part["count"]) for part in scalars)
            self.evicted = sum(int(part["evicted"]) for part in scalars) if self.shard == 0 else 0
            self._marks = [(int(version), float(time)) for version, time in scalars[0]["marks"]]


def mean_rows(
    parts: Sequence[tuple[Keys, torch.Tensor]], workers: int, *, touching: bool
) -> tuple[Keys, torch.Tensor, npt.NDArray[np.int64]]:
    """Returns the rows that some gradients touch, their mean gradient, and how many touch each.

    Args:
        parts: Of each gradient, in order of worker and local step, its keys, each once, and rows.
        workers: How many gradients there are; some may not touch the table.
        touching: Whether a row's mean is over the gradients that touch it; else over all, as of the joined batch.
    """
    if len(parts) == 1 and (workers == 1 or touching):
        return parts[0][0], parts[0][1], np.ones(len(parts[0][0]), np.int64)
    all_keys = np.concatenate([keys for keys, _ in parts])
    keys, inverse, times = np.unique(all_keys, return_inverse=True, return_counts=True)
    total = torch.zeros((len(keys), parts[0][1].shape[1]), dtype=parts[0][1].dtype)
    first = 0
    for own, rows in parts:  # one after the other: the sum has an order
        where = torch.from_numpy(inverse[first : first + len(own)])
        total.index_copy_(0, where, total.index_select(0, where).add_(rows))
        first += len(own)
    if touching:
        return keys, total.div_(torch.from_numpy(times).to(total.dtype).unsqueeze(1)), times
    return keys, total.div_(workers), times
