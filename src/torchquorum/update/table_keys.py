"""Which keys of a table are on one shard, and at which position the row of each is.

Owned by a `TablePart`. A fixed table has a row for each of its keys from the beginning, in their order; one that grows finds positions in
an index and uses those of rows that went again. What always holds: a position belongs to one key or is free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchquorum.memory.growing import Growing
from torchquorum.memory.key_index import KeyIndex, Keys, Positions, mix
from torchquorum.wire.plan import TableSpec

SHARD_SALT = 1


def shard_of(keys: Keys, num_shards: int) -> Positions:
    """Returns the shard of each key: by a hash, so that keys of any pattern are spread evenly."""
    if num_shards == 1:
        return np.zeros(len(keys), np.int64)
    return ((mix(keys, SHARD_SALT) >> np.uint64(33)) * np.uint64(num_shards) >> np.uint64(31)).astype(np.int64)


class TableKeys:
    """The keys of a table's rows on one shard.

    Args:
        spec: The table.
        shard: Which ps task this is.
        num_shards: How many there are.

    Attributes:
        most: How many rows there may be; None if the table grows.
        size: How many there are.
        end: The first position that was never used.
    """

    def __init__(self, spec: TableSpec, shard: int, num_shards: int) -> None:
        self._spec = spec
        self._all: Keys | None = None
        self.most: int | None = None
        if spec.is_fixed:
            self.most = spec.rows
            if num_shards > 1:  # which keys are here, and where: positions in the order of keys
                shards = shard_of(np.arange(spec.rows, dtype=np.int64), num_shards)
                self._all = np.flatnonzero(shards == shard)
                self._where = np.full(spec.rows, -1, np.int32)
                self._where[self._all] = np.arange(len(self._all), dtype=np.int32)
                self.most = len(self._all)
        self.size = self.end = self.most or 0
        self._index = None if spec.is_fixed else KeyIndex()
        self._keys = None if spec.is_fixed else Growing(np.int64)
        self._free = np.empty(0, np.int64)

    @property
    def grows(self) -> bool:
        """Whether rows come and go."""
        return self._index is not None

    @property
    def size_bytes(self) -> int:
        """Returns how much memory the keys take."""
        index = self._index.size_bytes if self._index is not None else 0
        return self.end * (8 if self.grows else 0) + index + len(self._free) * 8

    def find(self, keys: Keys) -> Positions:
        """Returns where the rows of keys are, -1 for those that are not there."""
        if self._index is not None:
            return self._index.find(keys)
        return keys if self._all is None else self._where[keys].astype(np.int64)

    def at(self, positions: Positions) -> Keys:
        """Returns the keys of rows that are there."""
        if self._keys is not None:
            return self._keys.array[positions]
        return positions if self._all is None else self._all[positions]

    def check(self, keys: Keys) -> None:
        """Raises ValueError if a key is not in the table, or not of this shard."""
        if not len(keys):
            return
        if self._spec.rows and (int(keys.min()) < 0 or int(keys.max()) >= self._spec.rows):
            raise ValueError(f"keys of table {self._spec.name} are not all from 0 to {self._spec.rows - 1}")
        if self._all is not None and bool((self._where[keys] < 0).any()):
            raise ValueError(f"keys of table {self._spec.name} are of another shard")

    def allocate(self, count: int, room: int) -> Positions:
        """Returns free positions; `insert` says whose they are.

        Raises:
            MemoryError: There is no room for so many.
        """
        again = self._free[len(self._free) - min(len(self._free), count) :]
        fresh = count - len(again)
        if self.end + fresh > min(room, (1 << 31) - 1):
            raise MemoryError(f"table {self._spec.name} has {self.size} rows on this ps task, and no room for more")
        self._free = self._free[: len(self._free) - len(again)]
        positions = np.concatenate([again, np.arange(self.end, self.end + fresh)])
        self.end += fresh
        self.size += count
        return positions

    def insert(self, keys: Keys, positions: Positions) -> None:
        """Gives allocated positions to keys."""
        assert self._index is not None and self._keys is not None
        self._index.insert(keys, positions)
        self._keys.array[positions] = keys

    def free(self, keys: Keys, positions: Positions) -> None:
        """The rows of keys, at these positions, are gone."""
        if not len(keys):
            return
        assert self._index is not None
        self._index.remove(keys)
        self._free = np.concatenate([self._free, positions])
        self.size -= len(positions)

    def are_live(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Returns, for each of these positions, whether a row is there."""
        return ~np.isin(positions, self._free) if len(self._free) else np.ones(len(positions), np.bool_)

    def live_mask(self) -> npt.NDArray[np.bool_]:
        """Returns, for each position that was ever used, whether a row is there."""
        live = np.ones(self.end, np.bool_)
        live[self._free] = False
        return live
