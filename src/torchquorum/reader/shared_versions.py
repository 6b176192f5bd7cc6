"""Reads versions from the ps tasks' shared memory on their own host: no message, and nothing for a ps task to do.

Owned by a `RunSource`. What always holds: memory is mapped so that it cannot be written to from here; what was copied is of one version of
each optimizer on all shards, or it is not used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchquorum.clock import SYSTEM
from torchquorum.errors import SegmentError
from torchquorum.fastpath.page import PageView
from torchquorum.memory.slots import PublishedSlot, Slots
from torchquorum.wire.messages import Plan, ReaderWelcome

TRIES = 5


class SharedVersions:
    """The versions of all shards of a run.

    Args:
        plan: The run's plan.
        welcomes: What each ps task has said.

    Raises:
        SegmentError: The memory of one cannot be opened.
    """

    def __init__(self, plan: Plan, welcomes: Sequence[ReaderWelcome]) -> None:
        self._rings: list[list[Slots]] = []  # by optimizer, then by shard
        self._pages: list[PageView | None] = []
        for track, of in enumerate(plan.tracks()):
            regions = of.layout().trained
            rings = [
                Slots.open(w.versions[track], region, read_only=True)
                for w, region in zip(welcomes, regions, strict=True)
            ]
            self._rings.append(rings)
            page = welcomes[0].pages[track]
            self._pages.append(PageView(page) if page is not None else None)

    @classmethod
    def opened(cls, plan: Plan, welcomes: Sequence[ReaderWelcome]) -> SharedVersions | None:
        """Returns the versions, if all ps tasks are on this host and their memory can be opened."""
        count = len(plan.tracks())
        if any(len(w.versions) != count or len(w.pages) != count for w in welcomes):
            return None
        try:
            return cls(plan, welcomes)
        except SegmentError:
            return None

    @property
    def is_given_up(self) -> bool:
        """Whether a ps task has given its memory up: other variables are created, or the job is over."""
        return any(ring.is_given_up for rings in self._rings for ring in rings)

    def newest(self) -> list[int]:
        """Returns the newest version of each optimizer that all shards have."""
        return [
            min(max(p.number for p in self._published(track, k)) for k in range(len(rings)))
            for track, rings in enumerate(self._rings)
        ]

    def copy(
        self, targets: Sequence[Sequence[torch.Tensor]], not_before: Sequence[int]
    ) -> tuple[list[int], float] | None:
        """Copies the newest versions; returns them and how many seconds ago the newest was made, None if that was not possible.

        Then what stands in the memory is of no version.

        Args:
            targets: Memory for each optimizer on each shard.
            not_before: Versions of which no older ones are wanted.
        """
        for _ in range(TRIES):
            chosen = self._choose()
            if chosen is None:
                continue
            versions = [found[0].number for found in chosen]
            if any(version < least for version, least in zip(versions, not_before, strict=True)):
                return None
            for rings, found, memory in zip(self._rings, chosen, targets, strict=True):
                for ring, place, target in zip(rings, found, memory, strict=True):
                    target.copy_(ring.bytes[place.slot])
            whole = all(
                ring.holds(place.slot, place.number)
                for rings, found in zip(self._rings, chosen, strict=True)
                for ring, place in zip(rings, found, strict=True)
            )
            if whole:
                return versions, SYSTEM.now() - max(place.at for found in chosen for place in found)
        return None

    def _choose(self) -> list[list[PublishedSlot]] | None:
        """Returns where a version lies that all shards have, of each optimizer, all of them current at one moment."""
        found: list[list[PublishedSlot]] = []
        for track, rings in enumerate(self._rings):
            known = [{p.number: p for p in self._published(track, k)} for k in range(len(rings))]
            common = set(known[0]).intersection(*known[1:])
            if not common:
                return None
            version = max(common)
            found.append([each[version] for each in known])
        if len(found) > 1 and [places[0].number for places in found[:-1]] != self.newest()[:-1]:
            return None  # another version came meanwhile: together these never were
        return found

    def _published(self, track: int, shard: int) -> list[PublishedSlot]:
        page = self._pages[track]
        if page is not None and (current := page.current) is not None:
            return [PublishedSlot(*current)]
        return self._rings[track][shard].published
