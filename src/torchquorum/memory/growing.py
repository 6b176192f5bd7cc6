"""Arrays that grow without being copied: address space is reserved once, and memory is taken page by page as it is first written.

Used for the rows of tables. What always holds: an array never moves, so views of it stay good; a page that was never written costs no
memory and reads as zeros; what is given back by `forget` does so again.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_BYTES = 1 << 30  # of address space, where there is little of it


def reservable_bytes() -> int:
    """Returns how much address space is reserved for one array: as much as there is memory, rounded up; it could not hold more."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(LEAST_BYTES, 1 << (total - 1).bit_length())


class Growing:
    """A flat array with room for as many elements as the machine's memory could hold.

    Args:
        dtype: Of its elements.
        most: How many elements there will be at most, where that is known.

    Attributes:
        array: All of the reserved room; only what was written costs memory.
    """

    def __init__(self, dtype: npt.DTypeLike, most: int | None = None) -> None:
        item = np.dtype(dtype).itemsize
        wanted = reservable_bytes() if most is None else max(mmap.PAGESIZE, min(most * item, reservable_bytes()))
        self._memory = _reserve(-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.array: npt.NDArray[Any] = np.frombuffer(self._memory, dtype=dtype)

    def __len__(self) -> int:
        return len(self.array)

    def forget(self, start: int, stop: int) -> None:
        """Gives the memory of whole pages between two elements back; they read as zeros afterwards, as do the rest between them."""
        item = self.array.itemsize
        first, last = -(-start * item // mmap.PAGESIZE) * mmap.PAGESIZE, stop * item // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            self.array[start:stop] = 0
            return
        self.array[start : first // item] = 0
        self.array[last // item : stop] = 0
        self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def _reserve(size_bytes: int) -> mmap.mmap:
    """Reserves address space; less of it where the system allows no more (`ulimit -v`, or strict accounting of memory)."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    while True:
        try:
            return mmap.mmap(-1, size_bytes, flags=flags)
        except (OSError, ValueError, MemoryError):
            if size_bytes <= LEAST_BYTES >> 6:
                raise
            size_bytes = max(LEAST_BYTES >> 6, size_bytes >> 1) // mmap.PAGESIZE * mmap.PAGESIZE
