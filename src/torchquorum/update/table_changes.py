"""Which rows of a table have changed or gone lately, so that a reader can be sent those and no others.

Owned by a `TablePart` once somebody reads it. What always holds: what is remembered is bounded; where it does not reach back far enough
that is said, and the rows' own versions tell.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from torchquorum.memory.key_index import Keys, Positions

MOST_POSITIONS = 4 << 20
MOST_GONE = 1 << 20


class TableChanges:
    """The changes of one table on one shard since it was first read.

    Args:
        version: The version at which that was.
    """

    def __init__(self, version: int) -> None:
        self._known_since = self._gone_known_since = version
        self._changed: deque[tuple[int, npt.NDArray[np.int32]]] = deque()
        self._gone: deque[tuple[int, Keys]] = deque()
        self._num_changed = self._num_gone = 0

    def changed(self, version: int, positions: Positions) -> None:
        """Rows were updated, or made, by the update that makes this version."""
        self._changed.append((version, positions.astype(np.int32)))
        self._num_changed += len(positions)
        while self._num_changed > MOST_POSITIONS and self._changed:
            self._known_since, dropped = self._changed.popleft()
            self._num_changed -= len(dropped)

    def went(self, version: int, keys: Keys) -> None:
        """Rows have gone with the update that makes this version."""
        self._gone.append((version, keys.copy()))
        self._num_gone += len(keys)
        while self._num_gone > MOST_GONE and self._gone:
            self._gone_known_since, dropped = self._gone.popleft()
            self._num_gone -= len(dropped)

    def positions_since(self, version: int) -> Positions | None:
        """Returns where rows were changed after a version, in order, each once; None if that is not known."""
        if version < self._known_since:
            return None
        found = [positions for at, positions in self._changed if at > version]
        return np.unique(np.concatenate(found)).astype(np.int64) if found else np.empty(0, np.int64)

    def gone_since(self, version: int) -> Keys | None:
        """Returns the keys that went after a version, each once; None if that is not known."""
        if version < self._gone_known_since:
            return None
        found = [keys for at, keys in self._gone if at > version]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
