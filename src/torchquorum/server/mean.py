"""The mean gradient of a recent update, for whoever draws it; the update itself keeps none.

Owned by the ps thread. What always holds: the first update's mean is kept, and after that one for each time somebody asks;
of large shards an even sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchquorum.placement.layout import Region, Variable
from torchquorum.transport.codec import Frame
from torchquorum.transport.memory import tensor_frame
from torchquorum.transport.messages import Mean, MeanPiece

SAMPLED = 2_000_000  # numbers per shard
LEAST_SAMPLED = 10_000  # of each piece


class MeanGradient:
    """Keeps the mean of one update. `wanted` says that the next one shall be kept."""

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

    def answer(self) -> tuple[Mean, list[Frame]]:
        """Returns what was kept last, and asks for the next."""
        self.wanted = True
        return Mean(self._version, self._pieces), [bytes(tensor_frame(self._numbers.view(torch.uint8)))]
