"""A table as it was at one place of the log, while it goes on: rows that change before they were written are copied first.

Made by the thread that owns the table; its rows are read by the saver's thread. This is the one place where two threads meet at a
table, under a lock. What always holds: every row that was there is read once, as it was; no more rows are copied than are changed
while the snapshot is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from torchquorum.formats.row_file import KEYS, VALUES, Chunk
from torchquorum.memory.key_index import Keys, Positions

CHUNK = 1 << 15


class TableSnapshot:
    """The rows of a table as they are now.

    Args:
        name: The table's name.
        live: For each position, whether its row is in the snapshot.
        keys_at: Returns the keys of positions, as they are now.
        arrays: The columns, whose memory never moves.
        beside: What else the table has: the keys that went, those that were seen.

    Attributes:
        name: The table's name.
        rows: How many rows there are in it.
        done: Whether all were read.
        finite: Whether no weight of those that were read is NaN or infinite.
    """

    def __init__(
        self,
        name: str,
        live: npt.NDArray[np.bool_],
        keys_at: Callable[[Positions], Keys],
        arrays: Mapping[str, npt.NDArray[Any]],
        beside: dict[str, npt.NDArray[Any]],
    ) -> None:
        self.name, self._live, self._keys_at, self._arrays, self._beside = name, live, keys_at, arrays, beside
        self._lock = threading.Lock()
        self.rows = int(np.count_nonzero(live))
        self._kept = np.zeros(len(live), np.bool_)
        self._copies: list[tuple[Positions, dict[str, npt.NDArray[Any]]]] = []
        self._next = 0  # rows before this position are read
        self.done, self.finite = False, True

    def columns(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Returns the dtype and shape of each column."""
        found = {name: (array.dtype, (self.rows, *array.shape[1:])) for name, array in self._arrays.items()}
        beside = {name: (array.dtype, array.shape) for name, array in self._beside.items()}
        return {KEYS: (np.dtype(np.int64), (self.rows,)), **found, **beside}

    def _take(self, positions: Positions) -> dict[str, npt.NDArray[Any]]:
        found = {name: array[positions] for name, array in self._arrays.items()}
        return {KEYS: self._keys_at(positions).astype(np.int64), **found}

    def keep(self, positions: Positions) -> None:
        """These rows are about to be changed; called by the thread that owns the table."""
        if self.done:
            return
        with self._lock:
            positions = positions[(positions >= self._next) & (positions < len(self._live))]
            positions = positions[self._live[positions] & ~self._kept[positions]]
            if len(positions):
                self._kept[positions] = True
                self._copies.append((positions, self._take(positions)))

    def chunks(self) -> Iterator[Chunk]:
        """Yields the rows as they were, some at a time; called by the thread that writes."""
        if self._beside:
            yield self._beside
        for start in range(0, len(self._live), CHUNK):
            stop = min(start + CHUNK, len(self._live))
            positions = np.flatnonzero(self._live[start:stop]) + start
            with self._lock:
                chunk = self._take(positions)
                for changed, copies in self._copies:
                    here = (changed >= start) & (changed < stop)
                    where = np.searchsorted(positions, changed[here])
                    for name, values in copies.items():
                        chunk[name][where] = values[here]
                self._next = stop
            self.finite = self.finite and bool(np.isfinite(chunk[VALUES]).all())
            yield chunk
        self.done = True
        self._copies.clear()
