"""Slots: a shared-memory segment cut into equal parts, each with room for one region and a number that says what it holds.

A ps task publishes versions in slots, a worker puts gradients into slots; both sides read the layout from here. The number
of a slot is -1 while it is being written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from torchquorum.errors import SegmentError
from torchquorum.memory.segments import PAGE_BYTES, Segment
from torchquorum.placement.layout import Region, Section
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
        start, stride = _pages(8 * num_slots), _pages(region.size_bytes)
        if num_slots < 1 or segment.size_bytes < start + num_slots * stride:
            raise SegmentError(
                f"shared memory of {segment.size_bytes} bytes is too small for {num_slots} slots of {stride} bytes"
            )
        self._segment = segment
        # As a view of Python's: a tensor takes microseconds to set one element.
        self._numbers = memoryview(segment.bytes[: 8 * num_slots].numpy()).cast("q")  # pyright: ignore[reportArgumentType]
        self.bytes = [segment.bytes[start + k * stride :][: region.size_bytes] for k in range(num_slots)]
        self.sections = [section_views(region, slot) for slot in self.bytes]

    @classmethod
    def create(cls, name: str, region: Region, num_slots: int) -> Slots:
        """Makes a segment of its own."""
        segment = Segment.create(name, _pages(8 * num_slots) + num_slots * _pages(region.size_bytes))
        slots = cls(segment, region, num_slots)
        for k in range(num_slots):
            slots._numbers[k] = -1
        return slots

    @classmethod
    def open(cls, ref: MemoryRef, region: Region) -> Slots:
        """Opens the segment of another process on this host."""
        return cls(Segment.open(ref), region, ref.num_slots)

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

    def close(self) -> None:
        """Closes the segment."""
        self._segment.close()
