"""The published versions of one shard: a few slots of shared memory, each one whole version.

Owned by the shard. What always holds: a slot that a live worker may still read, that is on its way to one, or that is
the current version is never written. A reader that was frozen and lost its lease can tell by the slot's number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchquorum.fastpath.page import slots_in_reach
from torchquorum.memory.slots import Slots
from torchquorum.placement.layout import Region
from torchquorum.wire.channel import Sent

SAVING = -1  # the reader that stands for the thread that writes checkpoints


class Versions:
    """The slots, who reads them, and which holds the current version."""

    def __init__(self, region: Region, num_workers: int, version: int = 0) -> None:
        self._most_sending = num_workers + 1
        # The current one, the next, the saver's, and one for each reader: also when workers may take others by themselves.
        num_slots = slots_in_reach(num_workers) + self._most_sending + num_workers + 3
        self.slots = Slots.create("versions", region, num_slots)
        self._readers: dict[int, int] = {}
        self.also_busy: Callable[[], list[int]] = list
        self._sending: list[tuple[int, Sent]] = []
        self._published: dict[int, int] = {}
        self.current = 0
        self.version = version
        self.slots.publish(0, version)

    def lease(self, worker: int) -> int:
        """Returns the current slot and keeps it from being written until the worker leases again or is forgotten."""
        self._readers[worker] = self.current
        return self.current

    def lease_copy(self, worker: int, sections: Sequence[torch.Tensor]) -> None:
        """Puts other values than the variables, at the current version, into a slot that the worker may then read."""
        slot = self.next_slot()
        for target, source in zip(self.slots.sections[slot], sections, strict=True):
            target.copy_(source)
        self.slots.mark(slot, self.version)
        self._readers[worker] = slot

    def leased(self, worker: int) -> int | None:
        """Returns the slot that a worker may be reading."""
        return self._readers.get(worker)

    def forget(self, worker: int) -> None:
        """Ends a worker's lease."""
        self._readers.pop(worker, None)

    def may_send_uncopied(self, slot: int) -> bool:
        """Whether a slot's bytes may be sent as they are; too many slots on slow connections must not use all up."""
        self._sending = [entry for entry in self._sending if not entry[1].done]
        busy = {s for s, _ in self._sending}
        return slot in busy or len(busy) < self._most_sending

    def sending(self, slot: int, sent: Sent) -> None:
        """Keeps a slot from being written while its bytes are on their way."""
        self._sending.append((slot, sent))

    def next_slot(self) -> int:
        """Returns a slot for the next version and marks its old content as gone."""
        self._sending = [entry for entry in self._sending if not entry[1].done]
        sending = (slot for slot, _ in self._sending)
        busy = {self.current, *self._readers.values(), *sending, *self.also_busy()}
        free = next(k for k in range(len(self.slots)) if k not in busy)
        self.slots.mark(free, -1)
        return free

    def publish(self, slot: int, version: int) -> None:
        """Makes a written slot the current version."""
        self.slots.publish(slot, version)
        self.current, self.version = slot, version

    def expect(self, version: int, slot: int) -> None:
        """A worker has published a version in a slot; the log comes to it later."""
        self._published[version] = slot

    def adopt(self, version: int) -> bool:
        """Makes a version that a worker has published the current one; False if none has.

        Its slot may hold a later version by now.
        """
        slot = self._published.pop(version, None)
        if slot is not None:
            self.current, self.version = slot, version
            if self.slots.holds(slot, version):
                self.slots.publish(slot, version)
        return slot is not None

    def close(self) -> None:
        """Releases the memory."""
        self.slots.give_up()
        self.slots.close()
