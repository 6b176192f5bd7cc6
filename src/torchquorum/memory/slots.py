"""Slots: a shared-memory segment cut into equal parts, each with room for one region and a number that says what it holds.

A ps task publishes versions in slots, a worker puts gradients into slots; both sides read the layout from here. The number
of a slot is -1 while it is being written. Beside the numbers stands which slots were published last, and when, for those who only read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchquorum.clock import SYSTEM
from torchquorum.errors import SegmentError
from torchquorum.memory.segments import PAGE_BYTES, Segment
from torchquorum.placement.layout import Piece, Region, Section
from torchquorum.wire.messages import MemoryRef

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


RECENT = 8  # published slots that are remembered
_WORDS = 2 + 2 * RECENT  # whether the owner has closed it, how many were published; which, and when
_SLOT_BITS = 16


class PublishedSlot(NamedTuple):
    """A version that was published: its number, its slot, and when, in seconds of the clock that never goes back."""

    number: int
    slot: int
    at: float


class Sections(list[torch.Tensor]):
    """Views of the sections of a region. `cut` keeps smaller views of them for the next use of the same memory."""

    __slots__ = ("cut",)

    cut: object

    def __init__(self, views: Iterable[torch.Tensor]) -> None:
        super().__init__(views)
        self.cut = None


def section_views(region: Region, memory: torch.Tensor) -> Sections:
    """Returns a flat typed view of each section of a region that starts at the first byte of `memory`."""
    return Sections(memory[s.start_byte : s.start_byte + s.size_bytes].view(DTYPES[s.dtype]) for s in region.sections)


def piece_places(region: Region) -> list[tuple[Piece, int, int]]:
    """Returns each piece of a region, with the bytes where it begins and ends."""
    found: list[tuple[Piece, int, int]] = []
    for section in region.sections:
        item = DTYPES[section.dtype].itemsize
        for piece in section.pieces:
            start = section.start_byte + piece.offset * item
            found.append((piece, start, start + piece.numel * item))
    return found


def clear_padding(section: Section, values: torch.Tensor) -> None:
    """Makes what lies between the pieces of a section zero."""
    at = 0
    for piece in section.pieces:
        values[at : piece.offset] = 0
        at = piece.offset + piece.numel
    values[at:] = 0


def region_bytes(region: Region, sections: Sequence[torch.Tensor]) -> npt.NDArray[np.uint8]:
    """Returns the sections' values as the bytes of a region, as they would lie in a slot; not copied if there is one."""
    if len(region.sections) == 1 and region.sections[0].size_bytes == region.size_bytes:
        found = sections[0].reshape(-1).view(torch.uint8).numpy()
    else:
        found = np.zeros(region.size_bytes, np.uint8)
        for section, values in zip(region.sections, sections, strict=True):
            found[section.start_byte : section.start_byte + section.size_bytes] = values.reshape(-1).view(torch.uint8)
    found = found.view()
    found.flags.writeable = False
    return found


def _pages(size_bytes: int) -> int:
    return max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)


class Slots:
    """The slots of a segment. Slots that are never touched cost no memory."""

    def __init__(self, segment: Segment, region: Region, num_slots: int) -> None:
        start, stride = _pages(8 * (num_slots + _WORDS)), _pages(region.size_bytes)
        if num_slots < 1 or segment.size_bytes < start + num_slots * stride:
            raise SegmentError(
                f"shared memory of {segment.size_bytes} bytes is too small for {num_slots} slots of {stride} bytes"
            )
        self._segment = segment
        # As a view of Python's: a tensor takes microseconds to set one element.
        self._numbers = memoryview(segment.bytes[: 8 * num_slots].numpy()).cast("q")  # pyright: ignore[reportArgumentType]
        words = segment.bytes[8 * num_slots : 8 * (num_slots + _WORDS)].numpy()
        self._words = memoryview(words).cast("q")  # pyright: ignore[reportArgumentType]
        self._times = memoryview(words).cast("d")  # pyright: ignore[reportArgumentType]
        self.bytes = [segment.bytes[start + k * stride :][: region.size_bytes] for k in range(num_slots)]
        self.sections = [section_views(region, slot) for slot in self.bytes]

    @classmethod
    def create(cls, name: str, region: Region, num_slots: int) -> Slots:
        """Makes a segment of its own."""
        segment = Segment.create(name, _pages(8 * (num_slots + _WORDS)) + num_slots * _pages(region.size_bytes))
        slots = cls(segment, region, num_slots)
        for k in range(num_slots):
            slots._numbers[k] = -1
        return slots

    @classmethod
    def open(cls, ref: MemoryRef, region: Region, *, read_only: bool = False) -> Slots:
        """Opens the segment of another process on this host; with `read_only` it cannot be written to from here."""
        return cls(Segment.open(ref, read_only=read_only), region, ref.num_slots)

    @property
    def ref(self) -> MemoryRef:
        """Returns how another process of this host opens these slots."""
        return self._segment.ref(len(self.bytes))

    def __len__(self) -> int:
        return len(self.bytes)

    def mark(self, slot: int, number: int) -> None:
        """Sets the number of what a slot holds; -1 while it is written."""
        self._numbers[slot] = number

    def holds(self, slot: int, number: int) -> bool:
        """Whether a slot holds that number; a reader asks after it has read."""
        return self._numbers[slot] == number

    def publish(self, slot: int, number: int) -> None:
        """Marks what a slot holds, and that it is the newest. Only the owner publishes."""
        self.mark(slot, number)
        count = self._words[1]
        at = 2 + count % RECENT
        self._times[RECENT + at] = SYSTEM.now()
        self._words[at] = number << _SLOT_BITS | slot
        self._words[1] = count + 1

    @property
    def published(self) -> list[PublishedSlot]:
        """Returns what was published last, the newest first; a slot may have been written again since, see `holds`."""
        count = self._words[1]
        places = (2 + k % RECENT for k in range(count - 1, max(-1, count - RECENT - 1), -1))
        return [
            PublishedSlot(self._words[k] >> _SLOT_BITS, self._words[k] & (1 << _SLOT_BITS) - 1, self._times[RECENT + k])
            for k in places
        ]

    @property
    def is_given_up(self) -> bool:
        """Whether the owner has closed it in good order: nothing is published here any more."""
        return self._words[0] != 0

    def give_up(self) -> None:
        """Says that nothing will be published here any more."""
        self._words[0] = 1

    def close(self) -> None:
        """Closes the segment."""
        self._segment.close()
