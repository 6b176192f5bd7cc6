"""The mean gradient of a recent update, for summaries; the update itself keeps none.

Owned by the ps thread. What always holds: the mean of the first update is kept, and after that one for each request; of
large shards an even sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchquorum.placement.layout import Region, Variable
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import tensor_frame
from torchquorum.wire.messages import Mean, MeanPiece

SAMPLED = 2_000_000  # numbers per shard
LEAST_SAMPLED = 10_000  # of each piece


class MeanGradient:
    """Keeps the mean of one update. `wanted` says that the next one is to be kept."""

    def __init__(self, region: Region, variables: Sequence[Variable]) -> None:
        self._region, self._variables = region, variables
        self.wanted = True
        self._version = -1
        self._pieces: list[MeanPiece] = []
        self._numbers = torch.empty(0)

    def keep(self, version: int, mean: Sequence[torch.Tensor], absent: frozenset[int]) -> None:
        """Copies the mean gradient of the update that made `version`; variables without a gradient are left out."""
        self.wanted = False
        pieces = [
            (section, piece)
            for section, values in zip(self._region.sections, mean, strict=True)
            if values.dtype.is_floating_point
            for piece in section.pieces
            if piece.variable not in absent
        ]
        most = max(LEAST_SAMPLED, SAMPLED // max(1, len(pieces)))
        samples: list[torch.Tensor] = []
        self._pieces = []
        for section, piece in pieces:
            values = mean[self._region.sections.index(section)][piece.offset : piece.offset + piece.numel]
            stride = max(1, -(-piece.numel // most))
            samples.append(values[::stride].to(torch.float32, copy=True))
            name = self._variables[piece.variable].name
            self._pieces.append(MeanPiece(name, piece.start, samples[-1].numel()))
        self._numbers = torch.cat(samples) if samples else torch.empty(0)
        self._version = version

    def answer(self, request: int = -1, others: Sequence[MeanGradient] = ()) -> tuple[Mean, list[Frame]]:
        """Returns what was kept last, as the answer to a request, and asks for the next.

        With `others`, those of the other optimizers of the shard, theirs too; the version is of this one.
        """
        pieces, numbers = list(self._pieces), [self._numbers]
        for other in others:
            pieces += other._pieces
            numbers.append(other._numbers)
        for each in (self, *others):
            each.wanted = True
        frame = bytes(tensor_frame(torch.cat(numbers).view(torch.uint8)))
        return Mean(self._version, pieces, request), [frame]
