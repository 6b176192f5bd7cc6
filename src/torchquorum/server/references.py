"""What readers hold that are sent compressed differences: a difference is of what a reader has, and not of what was true.

Owned by one shard's `Reads`. What always holds: a reader's next reference is what it has and the difference as it will decode it, so what
is lost in one difference is in the next; how many are kept is bounded, and a reader whose own has gone gets a full version.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchquorum.compress.compressor import Compressor, read_compressor
from torchquorum.memory.differences import add_difference, make_difference
from torchquorum.placement.layout import Region
from torchquorum.wire.frames import frame_tensor

MOST_REFERENCES = 32


@dataclass(slots=True)
class Reference:
    """What some readers hold of one optimizer's variables."""

    track: int
    version: int
    values: torch.Tensor


class References:
    """The references of one shard's readers."""

    def __init__(self, random_bits: Callable[[int], int]) -> None:
        self._random_bits = random_bits
        self._known: OrderedDict[int, Reference] = OrderedDict()
        self._made: OrderedDict[tuple[int, int, str], tuple[int, memoryview]] = OrderedDict()
        self._compressors: dict[str, Compressor] = {}

    def compressor(self, name: str) -> Compressor:
        """Returns a compressor by its name."""
        if name not in self._compressors:
            self._compressors[name] = read_compressor(name)
        return self._compressors[name]

    def whole(self, track: int, version: int, values: memoryview) -> int:
        """Returns the name of what a reader has that is sent these values."""
        for name, known in self._known.items():
            if known.version == version and known.track == track and memoryview(known.values.numpy()) == values:  # pyright: ignore
                return name
        return self._keep(Reference(track, version, torch.frombuffer(bytearray(values), dtype=torch.uint8)))

    def difference(
        self, name: int, track: int, version: int, values: memoryview, region: Region, compress: str
    ) -> tuple[int, memoryview] | None:
        """Returns what leads from a reference to about these values, and the name of what a reader has then; None for a full version."""
        known = self._known.get(name)
        if known is None or known.track != track:
            return None
        self._known.move_to_end(name)
        made = self._made.get((name, version, compress))
        if made is not None and made[0] in self._known:
            return made
        compressor = self.compressor(compress)
        frame = make_difference(region, compressor, frame_tensor(values, len(values)), known.values)
        if frame is None:
            return None
        held = known.values.clone()
        add_difference(region, compressor, frame, held)
        made = self._keep(Reference(track, version, held)), memoryview(frame.numpy())  # pyright: ignore
        self._made[name, version, compress] = made
        while len(self._made) > MOST_REFERENCES // 4:
            self._made.popitem(last=False)
        return made

    def _keep(self, reference: Reference) -> int:
        name = self._random_bits(62)
        self._known[name] = reference
        while len(self._known) > MOST_REFERENCES:
            self._known.popitem(last=False)
        return name
