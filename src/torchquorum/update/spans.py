"""What of a shard's memory is updated together: runs of variables of one parameter group and dtype that always get gradients together.

Owned by the updater. What always holds: a span is one stretch of flat memory, whatever the number of layers in it; spans are only ever cut
into smaller ones, and views of memory that comes again are kept until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchquorum.errors import ConfigError
from torchquorum.memory.slots import Sections
from torchquorum.placement.layout import Piece, Region, Variable
from torchquorum.update.kernels import SLICED_IN
from torchquorum.wire.messages import OptimizerSpec

# These update each element independently, so they may run over flat memory and over slices of a variable.
ELEMENTWISE = frozenset(
    [
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "RMSprop",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "ASGD",
        "Rprop",
        "DelayedNesterov",
    ]
)


@dataclass(eq=False)
class Span:
    """A run of pieces in one section that are updated together; `shape` is a variable's own where that matters."""

    section: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    steps: int = 0  # how many updates its state has seen, where a kernel makes them
    parameter: torch.nn.Parameter = field(default_factory=lambda: torch.nn.Parameter(torch.empty(0)))

    def view(self, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns this span of a slot's memory."""
        values = sections[self.section]
        if self.start == 0 and self.shape == (self.stop,) == tuple(values.shape):
            return values
        return values[self.start : self.stop].view(self.shape)


class Spans:
    """The spans of one shard.

    Args:
        region: The shard's trained variables in memory.
        variables: All variables of the optimizer.
        optimizer: Whether it may run over flat memory, and its parameter groups.

    Attributes:
        groups: The spans of each parameter group.
    """

    def __init__(self, region: Region, variables: Sequence[Variable], optimizer: OptimizerSpec) -> None:
        self._variables, self._elementwise = variables, optimizer.name in ELEMENTWISE
        self._cuts = object()  # replaced whenever memory is cut into other spans
        self.groups: list[list[Span]] = [[] for _ in optimizer.groups]
        for index, section in enumerate(region.sections):
            for group, given in enumerate(optimizer.groups):
                # A fused kernel, too, may round the tail of a vector differently from its body.
                whole = not self._elementwise or section.dtype not in SLICED_IN or bool(given.get("fused"))
                pieces = [p for p in section.pieces if variables[p.variable].group == group]
                runs = [[p] for p in pieces] if whole else ([pieces] if pieces else [])
                self.groups[group] += [self._span(index, run) for run in runs]

    def __iter__(self) -> Iterator[Span]:
        for spans in self.groups:
            yield from spans

    def views_of(self, sections: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the spans of a slot's or gradient's memory; of memory that comes again the views are kept."""
        if not isinstance(sections, Sections):
            return [span.view(sections) for span in self]
        kept = sections.cut
        if not (isinstance(kept, tuple) and kept[0] is self._cuts):
            kept = sections.cut = (self._cuts, [span.view(sections) for span in self])
        return kept[1]

    def cut(self, kind_of: Callable[[Piece], Any], was_cut: Callable[[Span, list[Span]], None]) -> list[int]:
        """Cuts spans so that all pieces of each are of one kind.

        Args:
            kind_of: The kind of a piece.
            was_cut: Is called with every span that is no more, and with its parts.

        Returns:
            The parameter groups that have other spans now.
        """
        changed: list[int] = []
        for group, spans in enumerate(self.groups):
            parts = [part for span in spans for part in self._parts(span, kind_of, was_cut)]
            if len(parts) != len(spans):
                self.groups[group] = parts
                self._cuts = object()
                changed.append(group)
        return changed

    def _parts(
        self, span: Span, kind_of: Callable[[Piece], Any], was_cut: Callable[[Span, list[Span]], None]
    ) -> list[Span]:
        runs: list[list[Piece]] = []
        for piece in span.pieces:
            if runs and kind_of(runs[-1][-1]) == kind_of(piece):
                runs[-1].append(piece)
            else:
                runs.append([piece])
        if len(runs) == 1:
            return [span]
        parts = [self._span(span.section, run) for run in runs]
        was_cut(span, parts)
        return parts

    def _span(self, section: int, pieces: Sequence[Piece]) -> Span:
        first, last = pieces[0], pieces[-1]
        start, stop = first.offset, last.offset + last.numel  # the padding between pieces is zero and stays so
        variable = self._variables[first.variable]
        if self._elementwise or len(pieces) > 1:
            shape: tuple[int, ...] = (stop - start,)
        elif first.numel == variable.numel:
            shape = tuple(variable.shape)
        else:
            raise ConfigError(
                f"variable {variable.name} is sliced over shards, which its optimizer cannot do; leave slice_bytes out"
            )
        return Span(section, start, stop, tuple(pieces), shape)
