"""What optimizers keep for each element, where kernels make the updates: slots of memory beside those of the versions.

Owned by the updater of a shard; where workers make updates by themselves the slots lie in shared memory, and the page says which
one belongs to the current version. What always holds: the state of the current version is never written in place while workers
may write another one; without them there is one slot, and it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchquorum.memory.slots import Sections, Slots, section_views
from torchquorum.placement.layout import Region
from torchquorum.wire.plan import MemoryRef


class KernelState:
    """The state of one shard: of each name, the sections of a region in every slot.

    Args:
        region: The shard's variables.
        names: What is kept of each element, by torch.optim's names.
        initial: What a new state holds.
        num_slots: How many slots workers of this host share with the ps; None if there are none.

    Attributes:
        current: The slot of the current version.
        also_busy: Returns slots that workers may be writing.
    """

    def __init__(self, region: Region, names: Sequence[str], initial: float, num_slots: int | None = None) -> None:
        self.names, self.current = tuple(names), 0
        self._shared = [Slots.create(name, region, num_slots) for name in names] if num_slots is not None else []
        self.also_busy: Callable[[], Sequence[int]] = tuple
        self._slots: list[list[Sections]] = (
            [slots.sections for slots in self._shared]
            if num_slots is not None
            else [[section_views(region, torch.zeros(region.size_bytes, dtype=torch.uint8))] for _ in names]
        )
        self._in_place, self._initial = num_slots is None, initial
        if initial:
            self.begin()

    def begin(self) -> None:
        """The state of the current version is a new one."""
        for sections in self.of(self.current):
            for values in sections:
                values.fill_(self._initial)

    @property
    def refs(self) -> list[MemoryRef]:
        """Returns how a worker of this host opens the slots of each name."""
        return [slots.ref for slots in self._shared]

    def of(self, slot: int) -> list[Sections]:
        """Returns a slot's memory: of each name, the sections."""
        return [slots[slot] for slots in self._slots]

    def next_slot(self) -> int:
        """Returns the slot that the next update writes: the same one, where nobody else writes."""
        if self._in_place:
            return self.current
        busy = {self.current, *self.also_busy()}
        return next(slot for slot in range(len(self._shared[0])) if slot not in busy)

    def close(self) -> None:
        """Gives shared memory up."""
        for slots in self._shared:
            slots.close()
