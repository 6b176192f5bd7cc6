"""Which rows of a table go, because of their age or their number, and which have gone.

Owned by a `TablePart`. What always holds: what goes follows from the versions of rows, their keys, and the versions and times in the log
alone, so shards that follow one log agree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from torchquorum.memory.key_index import Keys, Positions
from torchquorum.update.table_keys import TableKeys
from torchquorum.wire.plan import TableSpec

LOOKS = 16  # at the ages of rows, in the time after which they go
MOST_TOLD = 100_000  # evicted keys that are remembered for `table.evicted()`
Stamps = npt.NDArray[np.int32]


class TableAge:
    """The age and number of a table's rows on one shard.

    Args:
        spec: The table.
        num_shards: How many ps tasks there are.

    Attributes:
        evicted: How many rows were removed.
    """

    def __init__(self, spec: TableSpec, num_shards: int) -> None:
        self._ttl_steps, self._ttl_s = spec.ttl_steps, spec.ttl_s
        self.share = (
            -(-spec.capacity // num_shards) if spec.capacity else 0
        )  # how many rows there may be; 0 for any number
        self.evicted = 0
        self._told: deque[Keys] = deque()
        self._told_count = 0
        self._looked_at = -math.inf  # when the ages of all rows were looked at last
        self.version = 0  # the version of the last look
        self._marks: list[tuple[int, float]] = []  # which version was there at a time
        self._gone: list[tuple[int, Keys]] = []  # which keys went, and at which version, since the last checkpoint
        self._saved = False

    @property
    def is_bounded(self) -> bool:
        """Whether rows ever go."""
        return bool(self._ttl_steps or self._ttl_s or self.share)

    def look(self, version: int, time: float) -> int:
        """Returns the version after which rows must have been updated to stay, at a version and a time of the log; -1 if all do."""
        self.version = version
        if not self._is_due(version, time):
            return -1
        self._looked_at = time
        last = version - self._ttl_steps - 1 if self._ttl_steps else -1
        if self._ttl_s:
            old = [v for v, at in self._marks if at <= time - self._ttl_s]
            last = max(last, old[-1] if old else -1)
            self._marks = [mark for mark in self._marks if mark[0] >= (old[-1] if old else -1)]
            self._marks.append((version, time))
        return last

    def outdated(self, last: int, keys: TableKeys, stamps: Stamps) -> Positions:
        """Returns the rows that have not been updated after a version."""
        if last < 0:
            return np.empty(0, np.int64)
        return np.flatnonzero((stamps[: keys.end] <= last) & keys.live_mask())

    def _is_due(self, version: int, time: float) -> bool:
        """Whether the ages of all rows are to be looked at, which costs a little for each; the capacity is asked for with every update."""
        if self._ttl_steps:
            return version % max(1, self._ttl_steps // LOOKS) == 0
        return self._ttl_s > 0 and time - self._looked_at >= self._ttl_s / LOOKS

    @property
    def told(self) -> Keys:
        """Returns the keys that went last, the latest last."""
        return np.concatenate([np.empty(0, np.int64), *self._told])[-MOST_TOLD:]

    def surplus(self, keys: TableKeys, stamps: Stamps) -> Positions:
        """Returns the least recently updated of too many rows."""
        if not self.share or keys.size <= self.share:
            return np.empty(0, np.int64)
        live = np.flatnonzero(keys.live_mask())
        over = keys.size - (self.share - self.share // 64)
        of_live = stamps[live].astype(np.int64)
        # The oldest first; of the same age the smaller key, so that the order of positions does not matter.
        bound = np.partition(of_live, over - 1)[over - 1]
        older, same = live[of_live < bound], live[of_live == bound]
        same = same[np.argsort(keys.at(same), kind="stable")]
        return np.concatenate([older, same[: over - len(older)]])

    def went(self, keys: Keys) -> None:
        """The rows of these keys were removed, the oldest first."""
        self.evicted += len(keys)
        if self._saved:
            self._gone.append((self.version, keys))
        self._told.append(keys)
        self._told_count += len(keys)
        while self._told_count - len(self._told[0]) >= MOST_TOLD:
            self._told_count -= len(self._told.popleft())

    # -- to disk and back ---------------------------------------------------------------------------------------------

    def gone_since(self, version: int) -> Keys | None:
        """Returns the keys that went after a version, for a checkpoint that has the rest from that of this version.

        From now on they are kept; those that went before are forgotten, as no later checkpoint is based on an earlier one. A whole
        checkpoint (-1) needs none.
        """
        self._saved = True
        self._gone = [(at, keys) for at, keys in self._gone if at > version >= 0]
        return np.unique(np.concatenate([keys for _, keys in self._gone])) if self._gone else None

    def scalars(self) -> dict[str, Any]:
        """Returns what a checkpoint has of it."""
        looked_at = max(0.0, self._looked_at)
        return {"evicted": self.evicted, "marks": [list(mark) for mark in self._marks], "looked_at": looked_at}

    def restore(self, evicted: int, saved: Mapping[str, Any]) -> None:
        """Takes what a checkpoint has, and how many were removed on the shards that this one follows."""
        self.evicted = evicted
        self._marks = [(int(version), float(time)) for version, time in saved["marks"]]
        self._looked_at = float(saved.get("looked_at", 0.0))
