"""What a worker has computed and not yet given: bits that compression lost, and changes that were refused.

Owned by the worker's link, so that it outlives the loss of a ps; used on the worker's thread between filling a gradient in and sending
it. What always holds: what the ps gets and what is kept here add up to what was kept before and what was filled in; a gradient that is
pushed again after the loss of a ps is made from what was kept before it was pushed first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from torchquorum.compress.compressor import read_compressor
from torchquorum.compress.feedback import Feedback
from torchquorum.memory.slots import DTYPES, clear_padding, section_views
from torchquorum.placement.layout import Layout, Section
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import tensor_frame
from torchquorum.worker.flat import FlatParameters, Pusher


class _SectionResidual:
    """The residual of one section of a shard."""

    def __init__(self, section: Section, compress: str) -> None:
        self._section = section
        self._feedback = Feedback(read_compressor(compress), section.numel) if compress else None
        self.kept = (
            self._feedback.residual if self._feedback else torch.zeros(section.numel, dtype=DTYPES[section.dtype])
        )
        self._before = torch.zeros_like(self.kept)

    @property
    def message(self) -> torch.Tensor:
        """Returns the bytes of the last message; empty where nothing is compressed."""
        return self._feedback.message if self._feedback is not None else torch.empty(0, dtype=torch.uint8)

    def apply(self, given: torch.Tensor) -> None:
        """Adds what was kept, and leaves in `given` what the ps will have."""
        self._before.copy_(self.kept)
        if self._feedback is not None:
            self._feedback.send(given.to(torch.float32), given)
            clear_padding(self._section, given)
            clear_padding(self._section, self.kept)
            return
        given.add_(self.kept)
        self.kept.zero_()

    def undo(self) -> None:
        """What was sent last does not count: what was kept before is kept again."""
        self.kept.copy_(self._before)


class Residuals:
    """The residuals of all shards.

    Args:
        layout: Where the variables lie.
        compress: The name of the compressor; empty for none.
    """

    def __init__(self, layout: Layout, compress: str) -> None:
        self._layout, self.compress = layout, compress
        self._shards = [[_SectionResidual(s, compress) for s in region.sections] for region in layout.trained]
        self._frames: list[torch.Tensor | None] = [None] * len(self._shards)
        self._applied = False

    def apply(self, memory: Sequence[Sequence[torch.Tensor]], *, finite: bool) -> None:
        """The gradient lies in the shards' sections: adds what was kept, compresses, and keeps what that loses.

        With `finite` false it is about to be refused: what is kept stays, and zeros are sent.
        """
        self._applied = finite
        for k, (residuals, sections) in enumerate(zip(self._shards, memory, strict=True)):
            for residual, values in zip(residuals, sections, strict=True):
                if finite:
                    residual.apply(values)
                else:
                    values.zero_()
                    residual.message.zero_()
            self._frames[k] = torch.cat([r.message for r in residuals]) if self.compress and residuals else None

    def frame(self, k: int) -> Frame | None:
        """Returns the bytes that shard k gets; None where they are not compressed."""
        message = self._frames[k]
        return tensor_frame(message) if message is not None else None

    def undo(self) -> None:
        """What was sent last does not count, and may be sent again."""
        if self._applied:
            self._applied = False
            for residual in self._all():
                residual.undo()

    def add_gradients(self, flat: FlatParameters, share: float = 1.0) -> None:
        """What stands in the parameters' gradients, or a share of it, will not be pushed now: it is kept."""
        with torch.no_grad():
            for region, residuals in zip(self._layout.trained, self._shards, strict=True):
                sections = section_views(region, torch.zeros(region.size_bytes, dtype=torch.uint8))
                Pusher(flat, region, sections)()
                for residual, values in zip(residuals, sections, strict=True):
                    residual.kept.add_(values, alpha=share)

    def _all(self) -> Iterable[_SectionResidual]:
        return (residual for shard in self._shards for residual in shard)

    def by_variable(self) -> dict[str, torch.Tensor]:
        """Returns what is kept of each variable, flat."""
        found: dict[str, torch.Tensor] = {}
        for name, start, stop, numel, kept in self._pieces():
            found.setdefault(name, torch.zeros(numel, dtype=kept.dtype))[start:stop] = kept
        return found

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes over what `by_variable` returned; of variables that are missing, nothing is kept."""
        for name, start, stop, numel, kept in self._pieces():
            value = values.get(name)
            if value is not None and value.numel() == numel:
                kept.copy_(value[start:stop])
            else:
                kept.zero_()

    def _pieces(self) -> Iterable[tuple[str, int, int, int, torch.Tensor]]:
        for region, residuals in zip(self._layout.trained, self._shards, strict=True):
            for section, residual in zip(region.sections, residuals, strict=True):
                for piece in section.pieces:
                    variable = self._layout.variables[piece.variable]
                    kept = residual.kept[piece.offset : piece.offset + piece.numel]
                    yield variable.name, piece.start, piece.stop, variable.numel, kept


def make_residuals(layout: Layout, compress: str, *, local: bool) -> Residuals | None:
    """Returns the residuals of a worker; None where nothing is ever kept."""
    return Residuals(layout, compress) if compress or local else None
