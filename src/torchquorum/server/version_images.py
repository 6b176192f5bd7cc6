"""Copies of one optimizer's variables on a shard, for those who only read: one copy of a version serves all who ask for it.

Owned by the optimizer's part of the shard. What always holds: a copy is of one version, whoever makes versions meanwhile; it never changes,
so a reader that is slow holds up nobody; how many are kept for readers that have not taken theirs is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from torchquorum.clock import SYSTEM
from torchquorum.fastpath.page import FastPage
from torchquorum.memory.slots import piece_places, region_bytes
from torchquorum.placement.layout import Region
from torchquorum.server.reply import Delivery
from torchquorum.server.shard_variables import ShardVariables

MOST_IMAGES = 4
TRIES = 8


@dataclass(slots=True, eq=False)
class VersionImage:
    """A version that was copied, and the answers that carry it."""

    version: int
    values: memoryview
    averages: memoryview | None
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def is_under_way(self) -> bool:
        """Whether some of it has yet to reach a reader, and will."""
        self.deliveries = [each for each in self.deliveries if each.waits or each.is_under_way_to(each.peer)]
        return bool(self.deliveries)


class VersionImages:
    """The copies of one optimizer's versions.

    Args:
        variables: What is copied.
        num_variables: How many there are, on all shards.
        page: The fast path's page, where the plan allows it.
    """

    def __init__(self, variables: ShardVariables, num_variables: int, page: FastPage | None) -> None:
        self._variables, self._page = variables, page
        self._changed_at = np.full(num_variables, variables.versions.version, np.int64)
        self._kept: list[VersionImage] = []
        self._latest: VersionImage | None = None  # to compare with what workers make by themselves
        self._unsure = False

    # -- what changes -------------------------------------------------------------------------------------------------

    def changed(self, version: int, absent: Iterable[int] = ()) -> None:
        """A version was made that changes all variables but these."""
        unchanged = [(k, self._changed_at[k]) for k in absent]
        self._changed_at[:] = version
        for k, before in unchanged:
            self._changed_at[k] = before

    def assigned(self, version: int, variables: Iterable[int]) -> None:
        """A version was made that changes these variables alone."""
        self._changed_at[list(variables)] = version

    def adopted(self) -> None:
        """A version was made on the fast path, where nobody says what it changes."""
        self._unsure = True

    def changed_since(self, since: int) -> frozenset[int] | None:
        """Returns which variables of the last copy differ from what they were at a version; None for all."""
        chosen = np.flatnonzero(self._changed_at > since)
        return None if len(chosen) == len(self._changed_at) else frozenset(chosen.tolist())

    def forget(self) -> None:
        """Nobody reads: nothing is kept."""
        self._kept, self._latest = [], None

    def _compare(self, image: VersionImage) -> None:
        """Finds out what has changed since the copy before, where nobody has said so."""
        before, self._latest = self._latest, image
        if not self._unsure and image.version <= self._variables.versions.version:
            return
        self._unsure = False
        if before is None:
            self._changed_at[:] = image.version
            return
        for piece, start, stop in piece_places(self._variables.region):
            if image.values[start:stop] != before.values[start:stop]:
                self._changed_at[piece.variable] = image.version

    # -- copies -------------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> tuple[int, float]:
        """Returns the current version, and how many seconds ago it was made."""
        versions = self._variables.versions
        current = self._page_current()
        if current is not None and current[0] >= versions.version:
            return current[0], SYSTEM.now() - current[2]
        published = versions.slots.published
        at = published[0].at if published and published[0].number == versions.version else SYSTEM.now()
        return versions.version, SYSTEM.now() - at

    def current(self, *, averages: bool, exact: bool = False) -> VersionImage | None:
        """Returns a copy of the current version, or, unless `exact`, of an older one where too many are on their way; None for neither.

        Args:
            averages: Whether the moving averages are wanted, too.
            exact: Whether only the current version will do.
        """
        version = self.newest[0]
        for image in self._kept:
            if image.version == version and (image.averages is not None or not averages):
                return image
        self._kept = [image for image in self._kept if image.is_under_way]
        if len(self._kept) >= MOST_IMAGES:
            usable = [image for image in self._kept if image.averages is not None or not averages]
            return usable[-1] if usable and not exact else None
        image = self._copy(averages=averages)
        self._compare(image)
        self._kept.append(image)
        return image

    def _copy(self, *, averages: bool) -> VersionImage:
        versions, page = self._variables.versions, self._page
        shadows = self._variables.averages
        averaged = _copied(region_bytes(self._variables.region, shadows.shadows)) if averages and shadows else None
        for _ in range(TRIES):
            current = self._page_current()
            if current is None:
                break
            version, slot = current[:2]
            values = _copied(versions.slots.bytes[slot].numpy())
            if versions.slots.holds(slot, version):
                return VersionImage(version, values, averaged)
        else:  # versions come faster than they can be copied: for once nobody makes one meanwhile
            assert page is not None
            with page.locked():
                if (current := self._page_current()) is not None:
                    return VersionImage(current[0], _copied(versions.slots.bytes[current[1]].numpy()), averaged)
        return VersionImage(versions.version, _copied(versions.slots.bytes[versions.current].numpy()), averaged)

    def _page_current(self) -> tuple[int, int, float] | None:
        """Returns version, slot and time of the page while workers make the versions."""
        if self._page is None or not self._page.is_open:
            return None
        head = self._page.head
        return head[0], head[1], self._page.words.published_at


def _copied(values: np.ndarray) -> memoryview:
    return memoryview(values.tobytes())


def chosen_bytes(region: Region, values: memoryview, chosen: frozenset[int]) -> memoryview:
    """Returns the bytes of some variables of a region, one piece after the other."""
    return memoryview(
        b"".join(values[start:stop] for piece, start, stop in piece_places(region) if piece.variable in chosen)
    )
