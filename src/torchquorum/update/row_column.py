"""Something that every row of a table has: its values, or a state of its optimizer.

Owned by a `TablePart`. What always holds: the memory never moves; what `take` returns is good until the next call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchquorum.memory.growing import Growing
from torchquorum.memory.key_index import Positions


class RowColumn:
    """A column of a table; as rows of bytes it is gathered and scattered."""

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
