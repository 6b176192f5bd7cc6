"""An index from int64 keys to positions, looked up and changed by whole arrays of keys, with no Python per key.

A bucket is eight keys, which fill a cache line; a key is in the first bucket of its chain that had room. The index is cut into
segments by the key's hash, and each grows by itself, so the index as a whole never stands still to double. What always holds: a key is
there once; its bucket, or one that follows a bucket marked as overflowed, has it; at most seven of ten places are taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchquorum.memory.growing import Growing

Keys = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

PLACES = 8
SEGMENT_BITS = 6
SEGMENTS = 1 << SEGMENT_BITS
FULL, GROWTH = 0.7, 1.5
WORN = 0.5  # as many removals as half of its places, and a segment is put in order
LEAST_BUCKETS = 32
RESERVED_KEY = -(1 << 63)  # stands for an empty place
_EMPTY = np.int64(RESERVED_KEY)
_PLACE = np.arange(PLACES)
# Of every set of empty places of a bucket, as bits: its members in order, and how many there are.
_NTH = np.argsort((np.arange(1 << PLACES)[:, None] >> _PLACE & 1) == 0, axis=1, kind="stable")
_NUMBER = (np.arange(1 << PLACES)[:, None] >> _PLACE & 1).sum(1)


def mix(keys: Keys, salt: int = 0) -> npt.NDArray[np.uint64]:
    """Returns a hash of each key, 64 bits, all of them depending on all bits of the key (the finalizer of splitmix64)."""
    x = keys.view(np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class KeyIndex:
    """Where each key is.

    Args:
        most: How many keys there will be at most, where that is known.
    """

    def __init__(self, most: int | None = None) -> None:
        room = None if most is None else int(most / FULL * GROWTH * 4) + 8 * SEGMENTS * LEAST_BUCKETS * PLACES
        self._keys = Growing(np.int64, room)  # as key ^ RESERVED_KEY, so that fresh memory is empty
        self._positions = Growing(np.int32, room)
        self._overflowed = Growing(np.bool_, None if room is None else room // PLACES)
        # Of different sizes from the beginning: so they do not all grow at once.
        self._buckets = (LEAST_BUCKETS * GROWTH ** (np.arange(SEGMENTS) / SEGMENTS)).astype(np.int64)
        self._first = np.cumsum(self._buckets) - self._buckets
        self._taken = np.zeros(SEGMENTS, dtype=np.int64)
        self._removed = np.zeros(SEGMENTS, dtype=np.int64)  # since the marks of a segment were made
        self._end = int(self._buckets.sum())
        whole = len(self._keys.array) // PLACES
        self._by_bucket = self._keys.array[: whole * PLACES].reshape(whole, PLACES)
        self._lines = torch.from_numpy(self._by_bucket)

    def __len__(self) -> int:
        return int(self._taken.sum())

    @property
    def size_bytes(self) -> int:
        """Returns how much memory the index takes."""
        return int(self._buckets.sum()) * (PLACES * 12 + 1)

    def find(self, keys: Keys) -> Positions:
        """Returns the position of each key, -1 where it is not there."""
        stored = keys ^ _EMPTY
        segments, buckets = self._begin(keys)
        which, place, open_ = self._look(stored, buckets)
        at = self._positions.array[place].astype(np.int64)
        if len(which) == len(keys):
            return at
        found = np.full(len(keys), -1, dtype=np.int64)
        found[which] = at
        # Those whose bucket has overflowed may be in the next one; where all of a segment have, once round is enough.
        for _ in range(int(self._buckets.max())):
            if not len(open_):
                break
            buckets[open_] = self._next(segments[open_], buckets[open_])
            which, place, missing = self._look(stored[open_], buckets[open_])
            found[open_[which]] = self._positions.array[place]
            open_ = open_[missing]
        return found

    def insert(self, keys: Keys, positions: Positions) -> None:
        """Adds keys that are not there yet, each once."""
        if not len(keys):
            return
        hashed = mix(keys)
        segments = (hashed & np.uint64(SEGMENTS - 1)).astype(np.int64)
        stored, places = keys ^ _EMPTY, positions.astype(np.int32)
        moved = self._grow(np.bincount(segments, minlength=SEGMENTS))
        if moved is not None:
            stored, places = np.concatenate([moved[0], stored]), np.concatenate([moved[1], places])
            hashed = np.concatenate([mix(moved[0] ^ _EMPTY), hashed])
        self._put(stored, places, *self._buckets_of(hashed))

    def remove(self, keys: Keys) -> None:
        """Removes keys that are there."""
        stored = keys ^ _EMPTY
        segments, buckets = self._begin(keys)
        open_ = np.arange(len(keys))
        while len(open_):
            _, place, missing = self._look(stored[open_], buckets[open_])
            self._keys.array[place] = 0
            open_ = open_[missing]
            buckets[open_] = self._next(segments[open_], buckets[open_])
        gone = np.bincount(segments, minlength=SEGMENTS)
        self._taken -= gone
        self._removed += gone

    # -- buckets ------------------------------------------------------------------------------------------------------

    def _begin(self, keys: Keys) -> tuple[Positions, Positions]:
        """Returns each key's segment and the bucket where its chain begins."""
        return self._buckets_of(mix(keys))

    def _buckets_of(self, hashed: npt.NDArray[np.uint64]) -> tuple[Positions, Positions]:
        segments = (hashed & np.uint64(SEGMENTS - 1)).astype(np.int64)
        share = (hashed >> np.uint64(32)).astype(np.int64)
        return segments, self._first[segments] + ((share * self._buckets[segments]) >> 32)

    def _next(self, segments: Positions, buckets: Positions) -> Positions:
        first = self._first[segments]
        following = buckets + 1
        return np.where(following == first + self._buckets[segments], first, following)

    def _look(self, stored: Keys, buckets: Positions) -> tuple[Positions, Positions, Positions]:
        """Looks for each key in its bucket: returns which are there, at which place, and which of the others may be in the next."""
        lines = self._lines.index_select(0, torch.from_numpy(buckets)).numpy()
        hits = np.flatnonzero(lines == stored[:, None])
        which = hits >> 3
        if len(which) == len(stored):
            return which, (buckets << 3) + (hits & 7), which[:0]
        absent = np.ones(len(stored), np.bool_)
        absent[which] = False
        rest = np.flatnonzero(absent)
        return which, (buckets[which] << 3) + (hits & 7), rest[self._overflowed.array[buckets[rest]]]

    def _put(self, stored: Keys, positions: npt.NDArray[np.int32], segments: Positions, buckets: Positions) -> None:
        self._taken += np.bincount(segments, minlength=SEGMENTS)
        while len(stored):
            # Of those that want the same bucket, the first ones get its empty places; the bucket sends the others on.
            order = _order(buckets)
            stored, positions, segments, buckets = stored[order], positions[order], segments[order], buckets[order]
            begins = np.flatnonzero(np.concatenate([[True], buckets[1:] != buckets[:-1]]))
            counts = np.diff(begins, append=len(buckets))
            rank = np.arange(len(buckets)) - np.repeat(begins, counts)
            lines = self._lines.index_select(0, torch.from_numpy(buckets[begins])).numpy()
            empty = np.repeat(np.packbits(lines == 0, axis=1, bitorder="little")[:, 0], counts)
            fits = rank < _NUMBER[empty]
            place = (buckets[fits] << 3) + _NTH[empty[fits], rank[fits]]
            self._keys.array[place] = stored[fits]
            self._positions.array[place] = positions[fits]
            left = np.flatnonzero(~fits)
            stored, positions, segments, buckets = stored[left], positions[left], segments[left], buckets[left]
            self._overflowed.array[buckets] = True
            buckets = self._next(segments, buckets)

    def _grow(self, more: npt.NDArray[Any]) -> tuple[Keys, npt.NDArray[np.int32]] | None:
        """Gives each segment that would become too full larger room, at the end; the memory of its old room is given back.

        A segment whose keys have come and gone is emptied: without that, all its buckets would be marked in time, and no search would end.

        Returns:
            The keys of those segments, as they are stored, with their positions: they are to be put again.
        """
        need, found = self._taken + more, list[tuple[Keys, npt.NDArray[np.int32]]]()
        full, worn = need > self._buckets * (PLACES * FULL), self._removed > self._buckets * (PLACES * WORN)
        for segment in np.flatnonzero(full | worn):
            first, buckets = int(self._first[segment]), int(self._buckets[segment])
            old = slice(first * PLACES, (first + buckets) * PLACES)
            stored, positions = self._keys.array[old], self._positions.array[old]
            there = np.flatnonzero(stored)
            found.append((stored[there], positions[there]))
            room = max(int(buckets * GROWTH), int(need[segment] / (PLACES * FULL)) + 1) if full[segment] else 0
            if (self._end + room) * PLACES > len(self._keys.array):
                raise MemoryError(f"an index of {len(self)} keys has no room for {int(more.sum())} more")
            self._keys.forget(old.start, old.stop)
            self._positions.forget(old.start, old.stop)
            self._overflowed.forget(first, first + buckets)
            if room:
                self._first[segment], self._buckets[segment] = self._end, room
                self._end += room
            self._taken[segment] -= len(there)
            self._removed[segment] = 0
        if not found:
            return None
        return np.concatenate([stored for stored, _ in found]), np.concatenate([positions for _, positions in found])


def _order(buckets: Positions) -> Positions:
    """Returns an order of buckets that does not fall, those of one bucket as they came: a sort of whole numbers, which is the fastest."""
    count = len(buckets)
    bits = max(1, (count - 1).bit_length())
    packed = (buckets << bits) | np.arange(count)
    packed.sort()
    return packed & ((1 << bits) - 1)
