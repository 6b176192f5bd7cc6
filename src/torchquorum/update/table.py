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

from torchquorum.formats.row_file import REMOVED, SIGHTED, STAMPS, TIMES, VALUES
from torchquorum.memory.growing import Growing
from torchquorum.memory.key_index import Keys, Positions
from torchquorum.update.row_column import RowColumn
from torchquorum.update.row_inits import initial_rows
from torchquorum.update.row_kernels import ONE, RowKernel, kernel_of
from torchquorum.update.sightings import Sightings
from torchquorum.update.table_age import TableAge
from torchquorum.update.table_changes import TableChanges
from torchquorum.update.table_keys import TableKeys, shard_of
from torchquorum.update.table_snapshot import TableSnapshot
from torchquorum.wire.plan import TableSpec

SCANNED = 1 << 18  # positions that are looked at for one answer to a reader
RECENT = 8  # pulls whose places are remembered until their gradients come
NUMPY = {"float32": np.float32, "float64": np.float64}


@dataclass(slots=True)
class RowMoment:
    """When rows are updated, and with what: the version that is made, the options of their optimizer."""

    version: int
    options: Mapping[str, Any]


@dataclass(slots=True)
class Pulled:
    """A recent pull, whose gradients will come.

    Attributes:
        keys: Which rows.
        positions: Where they are; -1 where there was none.
        evicted: How many rows had gone by then.
        new: The places among the keys of those that were not there.
        initial: What these begin with.
    """

    keys: Keys
    positions: Positions
    evicted: int
    new: Positions
    initial: torch.Tensor

    def first_rows(self, new: Positions) -> torch.Tensor:
        """Returns what rows begin with, by their places among the keys."""
        if len(new) == len(self.new):
            return self.initial
        return self.initial.index_select(0, torch.from_numpy(np.searchsorted(self.new, new)))


class TablePart:
    """A table's rows on one shard.

    Args:
        spec: The table.
        shard: Which ps task this is.
        num_shards: How many there are.

    Attributes:
        count: How many updates have touched the table, on any shard.
        pulled: How many rows were asked for.
        found: How many of those were there.
        keys: Which keys have a row here, and where.
        age: Which rows go, and which have gone.
        sightings: Keys that have no row yet.
    """

    def __init__(self, spec: TableSpec, shard: int = 0, num_shards: int = 1) -> None:
        self.spec, self.shard, self.num_shards = spec, shard, num_shards
        self.kernel: RowKernel = kernel_of(spec.optimizer, spec.name)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.count = self.pulled = self.found = 0
        self.keys, self.age = TableKeys(spec, shard, num_shards), TableAge(spec, num_shards)
        self.sightings = Sightings(spec, shard, num_shards)
        dtype, most = NUMPY[spec.dtype], self.keys.most
        self.values = RowColumn(dtype, spec.dim, most)
        self.states = {
            name: RowColumn(dtype, None if kind == ONE else spec.dim, most) for name, kind in self.kernel.states.items()
        }
        self._first_states = dict.fromkeys(self.states, 0.0)
        self.stamps = Growing(np.int32, most)  # the version of a row's last update
        self._no_rows = torch.empty((0, spec.dim), dtype=self.dtype)
        self._recent: deque[Pulled] = deque(maxlen=RECENT)
        self._snapshot: TableSnapshot | None = None
        self._changes: TableChanges | None = None  # once somebody reads the table

    @property
    def size(self) -> int:
        """Returns how many rows are there."""
        return self.keys.size

    @property
    def size_bytes(self) -> int:
        """Returns how much memory the rows take, with all that belongs to them."""
        per_row = self.spec.dim * self.values.array.itemsize + 4
        per_row += sum(c.array.itemsize * (1 if c.array.ndim == 1 else self.spec.dim) for c in self.states.values())
        return self.keys.end * per_row + self.keys.size_bytes + self.sightings.size_bytes

    def begin(self, options: Mapping[str, Any]) -> None:
        """Says what the optimizer's options are, before the first update: some states begin with one of them."""
        whole = self.kernel.options(options)
        for name, column in self.states.items():
            self._first_states[name] = first = self.kernel.initial(whole, name)
            if not self.keys.grows and first:
                column.array[: self.size] = first

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _find_again(self, keys: Keys) -> tuple[Positions, Pulled | None]:
        """Returns where the rows of keys are, and the recent pull of them; its places are known, but for those that were not there."""
        for pulled in self._recent:
            same = pulled.evicted == self.age.evicted and len(pulled.keys) == len(keys)
            if same and np.array_equal(pulled.keys, keys):
                missing = np.flatnonzero(pulled.positions < 0)
                pulled.positions[missing] = self.keys.find(keys[missing])
                return pulled.positions, pulled
        return self.keys.find(keys), None

    def gather(self, keys: Keys, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns rows as they are now; those that are not there as they would begin.

        Args:
            keys: Which, each of this shard.
            out: Where to write them.

        Raises:
            ValueError: A key is not in the table.
        """
        self.keys.check(keys)
        positions = self.keys.find(keys)
        self.pulled += len(keys)
        if not self.keys.grows:
            self.found += len(keys)
            return torch.index_select(self.values.rows, 0, torch.from_numpy(positions), out=out)
        there = positions >= 0
        new = np.flatnonzero(~there)
        self.found += len(keys) - len(new)
        initial = self._initial(keys[new]) if len(new) else self._no_rows
        self._recent.append(Pulled(keys, positions, self.age.evicted, new, initial))
        if not len(new):
            return torch.index_select(self.values.rows, 0, torch.from_numpy(positions), out=out)
        rows = torch.empty((len(keys), self.spec.dim), dtype=self.dtype) if out is None else out
        torch.index_select(self.values.rows, 0, torch.from_numpy(np.maximum(positions, 0)), out=rows)
        return rows.index_copy_(0, torch.from_numpy(new), initial)

    def changed(self, keys: Keys, version: int, evicted: int) -> tuple[Positions, torch.Tensor]:
        """Returns which of some rows have changed since a version, by their places among the keys, and these rows as they are now.

        Args:
            keys: Which, each of this shard.
            version: Which version.
            evicted: What `evicted` was then.
        """
        positions, _ = self._find_again(keys)
        there = positions >= 0
        newer = np.zeros(len(keys), np.bool_)
        newer[there] = self.stamps.array[positions[there]] > version
        if evicted != self.age.evicted:
            newer |= ~there  # it may have had a row then
        places = np.flatnonzero(newer)
        rows = torch.empty((len(places), self.spec.dim), dtype=self.dtype)
        known, gone = np.flatnonzero(there[places]), np.flatnonzero(~there[places])
        rows[torch.from_numpy(known)] = self.values.rows.index_select(0, torch.from_numpy(positions[places[known]]))
        if len(gone):
            rows[torch.from_numpy(gone)] = self._initial(keys[places[gone]])
        return places, rows

    def _initial(self, keys: Keys) -> torch.Tensor:
        init = self.spec.init
        return initial_rows(init.name, init.numbers, self.spec.seed, keys, self.spec.dim, self.dtype)

    def _make(self, keys: Keys, initial: torch.Tensor) -> Positions:
        """Makes rows that are not there; returns where they are."""
        positions = self.keys.allocate(len(keys), len(self.values.array))
        self._keep(positions)
        self.keys.insert(keys, positions)
        self.values.put(positions, initial)
        for name, column in self.states.items():
            column.array[positions] = self._first_states[name]
        return positions

    def apply(
        self, keys: Keys, gradient: torch.Tensor, moment: RowMoment, seen: npt.NDArray[np.int64] | None = None
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
        positions, pulled = self._find_again(keys)
        if self.keys.grows and len(new := np.flatnonzero(positions < 0)):
            if self.sightings.counts:
                new = new[self.sightings.admit(keys[new], None if seen is None else seen[new], moment.version)]
            if len(new):
                initial = pulled.first_rows(new) if pulled is not None else self._initial(keys[new])
                positions[new] = self._make(keys[new], initial)
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
        if self._changes is not None:
            self._changes.changed(moment.version, positions)

    def _keep(self, positions: Positions) -> None:
        """Rows are about to change: one that is being saved is saved as it was."""
        if self._snapshot is not None:
            self._snapshot.keep(positions)
            if self._snapshot.done:
                self._snapshot = None

    # -- eviction -----------------------------------------------------------------------------------------------------

    def evict(self, version: int, time: float) -> int:
        """Removes the rows that have not been updated for too long, and the least recently updated of too many.

        Args:
            version: The version at this place of the log.
            time: The time that the log has for it.

        Returns:
            How many were removed.
        """
        if not self.keys.grows or not self.age.is_bounded:
            return 0
        before = self.age.evicted
        last = self.age.look(version, time)
        self._remove(self.age.outdated(last, self.keys, self.stamps.array))
        self._remove(self.age.surplus(self.keys, self.stamps.array))
        self.sightings.forget(self.age, last)
        return self.age.evicted - before

    def _remove(self, positions: Positions) -> None:
        if not len(positions):
            return
        keys = self.keys.at(positions)
        order = np.lexsort((keys, self.stamps.array[positions]))
        self.keys.free(keys[order], positions[order])
        self.age.went(keys[order])
        if self._changes is not None:
            self._changes.went(self.age.version, keys)

    # -- for those who only read --------------------------------------------------------------------------------------

    def gone_since(self, since: int, version: int) -> Keys | None:
        """Returns the keys whose rows went after a version and are not there now; None if that is not known. Now is `version`."""
        if self._changes is None:
            self._changes = TableChanges(version)
        if not self.age.is_bounded:
            return np.empty(0, np.int64)
        gone = self._changes.gone_since(since)
        return None if gone is None else gone[self.keys.find(gone) < 0] if len(gone) and self.keys.grows else gone

    def changed_since(self, since: int, start: int, most: int) -> tuple[Keys, torch.Tensor, int]:
        """Returns rows that were updated after a version, by position from `start` on: keys, rows, and where to go on, -1 for nowhere.

        Args:
            since: Which version; -1 for all rows.
            start: The first position to look at.
            most: How many rows at most.
        """
        known = self._changes.positions_since(since) if self._changes is not None and since >= 0 else None
        if known is not None:
            positions, end = known[np.searchsorted(known, start) :], -1
        else:
            stop = min(self.keys.end, start + max(most, SCANNED))
            positions = start + np.flatnonzero(self.stamps.array[start:stop] > since)
            end = stop if stop < self.keys.end else -1
        positions = positions[self.keys.are_live(positions)]
        if len(positions) > most:
            positions, end = positions[:most], int(positions[most])
        rows = self.values.rows.index_select(0, torch.from_numpy(positions))
        return self.keys.at(positions), rows, end

    # -- to disk and back ---------------------------------------------------------------------------------------------

    def snapshot(self, since: int = -1) -> TableSnapshot:
        """Returns the rows as they are now, to be read while the table goes on; only those updated after a version, with `since`."""
        gone, live = self.age.gone_since(since), self.keys.live_mask()
        beside: dict[str, npt.NDArray[Any]] = {}
        if since >= 0:
            live &= self.stamps.array[: len(live)] > since
            beside[REMOVED] = gone if gone is not None else np.empty(0, np.int64)
        if self.sightings.counts:
            beside[SIGHTED], beside[TIMES] = self.sightings.all()
        columns = {VALUES: self.values.array, **{name: c.array for name, c in self.states.items()}}
        self._snapshot = TableSnapshot(
            self.spec.name, live, self.keys.at, {**columns, STAMPS: self.stamps.array}, beside
        )
        return self._snapshot

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
        positions = self.keys.find(keys)
        if self.keys.grows and len(new := np.flatnonzero(positions < 0)):
            positions[new] = self._make(keys[new], self._initial(keys[new]))
        where = torch.from_numpy(mine)
        self.values.put(positions, columns[VALUES].index_select(0, where))
        for name, column in self.states.items():
            if name in columns:
                column.put(positions, columns[name].index_select(0, where))
        self.stamps.array[positions] = 0 if stamps is None else stamps[mine]

    def remove(self, keys: Keys) -> None:
        """Removes the rows of those of these keys that are here and have one, as a checkpoint says."""
        positions = self.keys.find(keys)
        positions = positions[positions >= 0]
        self.keys.free(self.keys.at(positions), positions)

    def load_sightings(self, keys: Keys, times: npt.NDArray[np.int64]) -> None:
        """Takes the sightings of keys without a row from a checkpoint."""
        mine = shard_of(keys, self.num_shards) == self.shard
        self.sightings.load(keys[mine], times[mine])

    def scalars(self) -> dict[str, Any]:
        """Returns what else a checkpoint has of the table."""
        kept = {"count": self.count, "rows": self.size, "pulled": self.pulled, "found": self.found}
        return {**kept, "size_bytes": self.size_bytes, **self.age.scalars()}

    def restore(self, scalars: Sequence[Mapping[str, Any]]) -> None:
        """Takes what `scalars` returned on all shards of a checkpoint."""
        if scalars:
            self.count = max(int(part["count"]) for part in scalars)
            evicted = sum(int(part["evicted"]) for part in scalars) if self.shard == 0 else 0
            self.age.restore(evicted, scalars[0])


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
