"""How old rows may be that a forward pass uses, and the rows of hot keys that a worker keeps because of that.

Owned by the worker's thread, with its exchange of rows. What always holds: nothing is kept unless it was asked for; a kept row is used
only while the version that this worker last took is at most `max_staleness` updates newer than the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from torchquorum.errors import ConfigError
from torchquorum.memory.key_index import KeyIndex, Keys, Positions
from torchquorum.wire.plan import TableSpec


@dataclass(frozen=True)
class Reading:
    """How a worker reads rows of tables: `tq.Session(..., rows=tq.rows.Reading(max_staleness=4, keep=100_000))`.

    Attributes:
        max_staleness: How many updates older a row may be than the version that the worker last took. With 0, the default, rows that were
            asked for ahead of time and have changed since are fetched again; with more they are used as they are.
        keep: How many rows of each table a worker keeps, those that it used last, and reads again while they are not too old; 0 for none.
    """

    max_staleness: int = 0
    keep: int = 0

    def __post_init__(self) -> None:
        for name, value in (("max_staleness", self.max_staleness), ("keep", self.keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"tq.rows.Reading({name}={value!r}): must be a whole number, 0 or more")
        if self.keep and not self.max_staleness:
            raise ConfigError(
                f"tq.rows.Reading(keep={self.keep}): kept rows are older than the ps's, so it has no effect with max_staleness=0; give "
                "max_staleness=1 or more, or leave it out"
            )

    def __str__(self) -> str:
        kept = f", and {self.keep:,} rows of each table are kept between steps" if self.keep else ""
        return f"rows may be read up to {self.max_staleness} updates old{kept}"


class KeptRows:
    """The rows of one table that a worker keeps.

    Args:
        spec: The table.
        most: How many rows at most.

    Attributes:
        hits: How many rows were read from here.
    """

    def __init__(self, spec: TableSpec, most: int) -> None:
        self._most, self.hits = most, 0
        self._index = KeyIndex(2 * most)
        self._keys = np.zeros(most, np.int64)
        self._rows = torch.empty((most, spec.dim), dtype=getattr(torch, spec.dtype))
        self._versions = np.full(most, -1, np.int64)
        self._used = np.full(most, -1, np.int64)  # when, in pulls
        self._size = self._pulls = 0

    def find(self, keys: Keys, least: int) -> Positions:
        """Returns where rows of at least this version are, -1 for those that are not."""
        self._pulls += 1
        positions = self._index.find(keys)
        there = positions >= 0
        self._used[positions[there]] = self._pulls
        positions[there & (self._versions[positions] < least)] = -1
        self.hits += int(np.count_nonzero(positions >= 0))
        return positions

    def take(self, positions: Positions) -> torch.Tensor:
        """Returns copies of rows."""
        return self._rows.index_select(0, torch.from_numpy(positions))

    def put(self, keys: Keys, rows: torch.Tensor, version: int) -> None:
        """Keeps rows as they are at a version; the ones that were used longest ago make room."""
        keys, rows = keys[: self._most], rows[: self._most]
        positions = self._index.find(keys)
        new = np.flatnonzero(positions < 0)
        self._used[positions[positions >= 0]] = self._pulls
        if len(new):
            positions[new] = self._make_room(len(new))
            self._index.insert(keys[new], positions[new])
            self._keys[positions[new]] = keys[new]
        self._rows.index_copy_(0, torch.from_numpy(positions), rows)
        self._versions[positions], self._used[positions] = version, self._pulls

    def _make_room(self, count: int) -> npt.NDArray[np.int64]:
        fresh = np.arange(self._size, min(self._size + count, self._most))
        self._size += len(fresh)
        over = count - len(fresh)
        if not over:
            return fresh
        used = self._used.copy()
        used[fresh] = self._pulls + 1
        oldest = np.argpartition(used, over - 1)[:over]
        self._index.remove(self._keys[oldest])
        return np.concatenate([fresh, oldest])
