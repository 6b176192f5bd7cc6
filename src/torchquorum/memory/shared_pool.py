"""Pieces of one shared segment, taken and given back by the process that made it; others read and write the pieces that it names.

A worker has one for each ps task of its host, for rows of tables: the ps gathers rows into it, and reads gradients of rows in place. What
always holds: a piece that was taken overlaps no other until it is given back; memory that was never touched costs nothing, and the lowest
free piece is taken first, so what is touched stays small.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque

import torch

from torchquorum.memory.segments import Segment
from torchquorum.wire.messages import MemoryRef

ALIGNED_BYTES = 64


def rows_behind(at: int, count: int, row_bytes: int) -> tuple[int, int]:
    """Returns where the rows lie whose keys are at a place, and how many bytes they are."""
    return at + -(-8 * count // ALIGNED_BYTES) * ALIGNED_BYTES, count * row_bytes


class SharedPool:
    """A segment of this process, from which pieces are taken.

    Args:
        name: What it is for, as the system shows it.
        size_bytes: How large it is.

    Raises:
        SegmentError: No shared memory can be had.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        self._segment = Segment.create(name, size_bytes)
        self._free = [(0, self._segment.size_bytes)]  # (begin, end), in order, no two of them adjacent
        self._taken: dict[int, int] = {}
        self._returned: deque[int] = deque()  # by whichever thread let go of the last tensor

    @property
    def ref(self) -> MemoryRef:
        """Returns how another process of this host opens the segment."""
        return self._segment.ref(1)

    def take(self, size_bytes: int) -> int | None:
        """Returns where a free piece of so many bytes begins; None if there is none."""
        while self._returned:
            self._give(self._returned.popleft())
        size = max(ALIGNED_BYTES, -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES)
        for k, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[k : k + 1] = [(begin + size, end)] if end - begin > size else []
                self._taken[begin] = begin + size
                return begin
        return None

    def give(self, piece: int) -> None:
        """Gives a piece back; any thread may."""
        self._returned.append(piece)

    def bytes(self, at: int, size_bytes: int) -> torch.Tensor:
        """Returns the memory from a place on, as a flat tensor of bytes."""
        return self._segment.bytes[at : at + size_bytes]

    def lend(self, piece: int, at: int, size_bytes: int) -> torch.Tensor:
        """Returns the memory from a place of a piece on; the piece is given back when nobody uses this tensor any more."""
        if not size_bytes:
            self.give(piece)
            return torch.empty(0, dtype=torch.uint8)  # an empty one of numpy has strides that cannot be viewed
        array = self.bytes(at, size_bytes).numpy()
        weakref.finalize(array, self.give, piece).atexit = False
        return torch.from_numpy(array)  # which holds the array

    def _give(self, piece: int) -> None:
        begin, end = piece, self._taken.pop(piece)
        insort(self._free, (begin, end))
        k = self._free.index((begin, end))
        if k + 1 < len(self._free) and self._free[k + 1][0] == end:
            self._free[k : k + 2] = [(begin, self._free[k + 1][1])]
        if k and self._free[k - 1][1] == begin:
            self._free[k - 1 : k + 1] = [(self._free[k - 1][0], self._free[k][1])]

    def close(self) -> None:
        """Closes the file; the memory goes with the last tensor on it."""
        self._segment.close()


class PoolOfOther:
    """The pool of another process on this host.

    Raises:
        SegmentError: It cannot be opened.
    """

    def __init__(self, ref: MemoryRef) -> None:
        self._segment = Segment.open(ref)

    def bytes(self, at: int, size_bytes: int) -> torch.Tensor:
        """Returns the memory from a place on, as a flat tensor of bytes.

        Raises:
            ValueError: It is not all there.
        """
        if at < 0 or at % ALIGNED_BYTES or size_bytes < 0 or at + size_bytes > self._segment.size_bytes:
            raise ValueError(f"{size_bytes} bytes from {at} on are not all in a segment of {self._segment.size_bytes}")
        return self._segment.bytes[at : at + size_bytes]
