"""Keys that were seen and have no row yet: `tq.Table(admit=n)` gives a key a row when n gradients have touched it.

Owned by a `TablePart`. What always holds: only gradients count, so shards that follow one log agree; a key that has a row is not here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchquorum.memory.key_index import Flags, Keys

Counts = npt.NDArray[np.int64]


class Sightings:
    """How often each key was seen.

    Args:
        admit: How often a key is seen until it has a row.
    """

    def __init__(self, admit: int) -> None:
        self._admit = admit
        self._times: dict[int, int] = {}

    @property
    def counts(self) -> bool:
        """Whether keys are counted at all."""
        return self._admit > 1

    def admit(self, keys: Keys, seen: Counts | None) -> Flags:
        """Counts sightings of keys that have no row; returns which are to have one now.

        Args:
            keys: Which.
            seen: How many gradients have touched each; one by default.
        """
        admitted = np.zeros(len(keys), np.bool_)
        for at, key in enumerate(keys.tolist()):  # those without a row only
            total = self._times.get(key, 0) + (1 if seen is None else int(seen[at]))
            if total >= self._admit:
                admitted[at] = True
                self._times.pop(key, None)
            else:
                self._times[key] = total
        return admitted

    def all(self) -> tuple[Keys, Counts]:
        """Returns the keys and how often each was seen, for a checkpoint."""
        return np.array(list(self._times), np.int64), np.array(list(self._times.values()), np.int64)

    def load(self, keys: Keys, times: Counts) -> None:
        """Takes what a checkpoint has."""
        self._times.update(zip(keys.tolist(), times.tolist(), strict=True))
