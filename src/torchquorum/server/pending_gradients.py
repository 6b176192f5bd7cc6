"""The gradients that a shard holds until the log says what becomes of them.

Owned by the shard. What always holds: a gradient that was decided on is never stored again; one that lies in memory which its
worker may write again is copied before the worker goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from torchquorum.compress.compressor import read_compressor
from torchquorum.memory.slots import DTYPES, Slots, clear_padding, section_views
from torchquorum.placement.layout import Region
from torchquorum.rules.quorum import Key
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor
from torchquorum.wire.messages import Push
from torchquorum.wire.stream import Room

MOST_WEIGHT = 1e12


@dataclass(slots=True)
class Gradient:
    """This shard's part of a gradient: its sections, the variables that have none in it, and the version it was computed at.

    While `borrowed` it lies in the worker's shared memory, or in the receive buffer of its connection, either of which may be
    written again once the worker is released.
    """

    sections: list[torch.Tensor]
    absent: frozenset[int]
    borrowed: bool
    version: int = 0
    weight: float = 0.0


class PendingGradients:
    """The undecided gradients of one shard, and up to which step those of each incarnation are decided."""

    def __init__(self, region: Region, compress: str = "") -> None:
        self._region = region
        self._compressor = read_compressor(compress) if compress else None
        self._gradients: dict[Key, Gradient] = {}
        self._requests: dict[int, tuple[int, Key]] = {}
        self._decided: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._gradients)

    def __contains__(self, key: Key) -> bool:
        return key in self._gradients

    def __repr__(self) -> str:
        return repr(self._gradients)

    def store(self, key: Key, push: Push, memory: Slots | None, frames: Sequence[Frame]) -> None:
        """Keeps a pushed gradient; `memory` is its worker's gradient slots.

        Raises:
            ValueError: The gradient does not fit the variables.
        """
        if push.slot >= 0:
            if memory is None or push.slot >= len(memory):
                raise ValueError(f"gradient slot {push.slot} of worker {push.worker} is not known here")
            sections = memory.sections[push.slot]
        else:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} tensor frames, expected 1")
            sections = self._cut(frames[0]) if self._compressor is None else self._decode(frames[0])
        borrowed = push.slot >= 0 or self._compressor is None
        weight = push.of.weight if push.of is not None else 0.0
        if not 0 <= weight < MOST_WEIGHT:
            raise ValueError(f"a gradient counts as {weight}: must be 0 or more, and below {MOST_WEIGHT:g}")
        found = Gradient(sections, frozenset(push.absent), borrowed=borrowed, version=push.version, weight=weight)
        self._gradients[key] = found

    def store_shared(self, key: Key, memory: Slots) -> None:
        """Keeps a gradient of the fast path, which lies in the first slot of its worker's memory."""
        self._gradients[key] = Gradient(memory.sections[0], frozenset(), borrowed=True)

    def _cut(self, frame: Frame) -> list[torch.Tensor]:
        """Returns the sections of a received gradient; the views of a receive buffer are made once."""
        room = frame.obj if isinstance(frame, memoryview) else None
        if not isinstance(room, Room):
            return section_views(self._region, frame_tensor(frame, self._region.size_bytes))
        kept = room.cut
        if not (isinstance(kept, tuple) and kept[0] is self._region):
            views = section_views(self._region, frame_tensor(frame, self._region.size_bytes))
            kept = room.cut = (self._region, views)
        return kept[1]

    def _decode(self, frame: Frame) -> list[torch.Tensor]:
        """Returns the sections that a compressed gradient stands for, in memory of its own.

        Raises:
            ValueError: It does not fit the variables, or is damaged.
        """
        assert self._compressor is not None
        sizes = [self._compressor.size_bytes(section.numel) for section in self._region.sections]
        parts = frame_tensor(frame, sum(sizes)).split(sizes)
        sections = []
        for section, part in zip(self._region.sections, parts, strict=True):
            values = torch.empty(section.numel, dtype=torch.float32)
            self._compressor.decode(part.clone(), values)  # a clone is aligned
            clear_padding(section, values)
            sections.append(values.to(DTYPES[section.dtype]))
        return sections

    def note_request(self, request: int, key: Key) -> None:
        """Notes which request pushed a gradient, the latest if several did."""
        self._requests[key.worker] = (request, key)

    def of_request(self, worker: int, incarnation: int, request: int) -> Key | None:
        """Returns the gradient that a request pushed, if it is here and undecided."""
        latest, key = self._requests.get(worker, (-1, Key(-1, -1, -1)))
        return key if (latest, key.incarnation) == (request, incarnation) and key in self._gradients else None

    def is_decided(self, key: Key) -> bool:
        """Whether this gradient, or a later one of its worker, was decided on: it is a late duplicate."""
        return key.local_step <= self._decided.get((key.worker, key.incarnation), 0)

    def drop(self, keys: Iterable[Key]) -> None:
        """These gradients are decided on, and will not be used here."""
        for key in keys:
            self._gradients.pop(key, None)
            self._decide(key)

    def copy_of(self, key: Key) -> Gradient:
        """Returns a copy of a gradient that is here and undecided."""
        found = self._gradients[key]
        return replace(found, sections=[section.clone() for section in found.sections], borrowed=False)

    def take(self, keys: Sequence[Key]) -> list[Gradient]:
        """Removes and returns gradients that make an update."""
        taken = [self._gradients.pop(key) for key in keys]
        for key in keys:
            self._decide(key)
        return taken

    def _decide(self, key: Key) -> None:
        life = key.worker, key.incarnation
        self._decided[life] = max(key.local_step, self._decided.get(life, 0))

    def copy_borrowed(self, worker: int) -> None:
        """A worker goes on while its gradient still waits for a round: what lies in its memory is copied."""
        for key, gradient in self._gradients.items():
            if key.worker == worker and gradient.borrowed:
                gradient.sections = [section.clone() for section in gradient.sections]
                gradient.borrowed = False

    def forget(self, lives: Iterable[tuple[int, int]]) -> None:
        """Drops what is known of incarnations that are refused as unknown from now on."""
        for life in lives:
            self._decided.pop(life, None)
