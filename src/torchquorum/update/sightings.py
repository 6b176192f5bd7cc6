"""Keys that were seen and have no row yet: `tq.Table(admit=n)` gives a key a row when n gradients have touched it.

Owned by a `TablePart`. What always holds: only gradients count, so shards that follow one log agree; a key that has a row is not here;
nothing is done key by key.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from torchquorum.memory.growing import Growing
from torchquorum.memory.key_index import Flags, Keys
from torchquorum.update.table_age import TableAge
from torchquorum.update.table_keys import TableKeys
from torchquorum.wire.plan import TableSpec

Counts = npt.NDArray[np.int64]


class Sightings:
    """How often each key was seen.

    Args:
        spec: The table.
        shard: Which ps task this is.
        num_shards: How many there are.
    """

    def __init__(self, spec: TableSpec, shard: int, num_shards: int) -> None:
        self._admit = spec.admit
        self._keys = TableKeys(spec, shard, num_shards) if self.counts else None
        self._times, self._stamps = (Growing(np.int32, None if self.counts else 0) for _ in range(2))

    @property
    def counts(self) -> bool:
        """Whether keys are counted at all."""
        return self._admit > 1

    def __len__(self) -> int:
        return self._keys.size if self._keys is not None else 0

    @property
    def size_bytes(self) -> int:
        """Returns how much memory they take."""
        return self._keys.size_bytes + self._keys.end * 8 if self._keys is not None else 0

    def admit(self, keys: Keys, seen: Counts | None, version: int) -> Flags:
        """Counts sightings of keys that have no row; returns which are to have one now.

        Args:
            keys: Which, each once.
            seen: How many gradients have touched each; one by default.
            version: The version that is made.
        """
        assert self._keys is not None
        positions, more = self._keys.find(keys), np.ones(len(keys), np.int64) if seen is None else seen
        known = positions >= 0
        times = np.where(known, self._times.array[positions], 0) + more
        admitted = times >= self._admit
        self._keys.free(keys[admitted & known], positions[admitted & known])
        self._note(keys[~admitted], positions[~admitted], times[~admitted], version)
        return admitted

    def _note(self, keys: Keys, positions: npt.NDArray[np.int64], times: Counts, stamps: Counts | int) -> None:
        assert self._keys is not None
        new = np.flatnonzero(positions < 0)
        positions[new] = self._keys.allocate(len(new), len(self._times))
        self._keys.insert(keys[new], positions[new])
        self._times.array[positions], self._stamps.array[positions] = times, stamps

    def forget(self, age: TableAge, last: int) -> None:
        """Keys that were not seen after a version begin anew; so do those not seen for longest, of more than there may be rows."""
        if self._keys is not None:
            for which in (partial(age.outdated, last), age.surplus):
                old = which(self._keys, self._stamps.array)
                self._keys.free(self._keys.at(old), old)

    # -- to disk and back ---------------------------------------------------------------------------------------------

    def all(self) -> tuple[Keys, Counts]:
        """Returns the keys, in order, and for a checkpoint how often each was seen, with the version of the last time above 32 bits."""
        assert self._keys is not None
        live = np.flatnonzero(self._keys.live_mask())
        keys = self._keys.at(live)
        order = np.argsort(keys)
        stamps = self._stamps.array[live].astype(np.int64)
        return keys[order], (self._times.array[live] | stamps << 32)[order]

    def load(self, keys: Keys, times: Counts) -> None:
        """Takes what a checkpoint has; what was here of these keys goes."""
        assert self._keys is not None
        self._note(keys, self._keys.find(keys), times & 0xFFFFFFFF, times >> 32)
