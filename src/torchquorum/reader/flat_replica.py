"""The memory of a replica that is read from ps tasks: of each optimizer and shard one region, as it lies there.

Owned by a `RunSource`. What always holds: after `assemble` the named tensors of the replica are what stands in the regions; a variable that
lies whole on one shard is a view of it.
"""

from __future__ import annotations

import torch

from torchquorum.compress.compressor import Compressor, read_compressor
from torchquorum.memory.differences import add_difference
from torchquorum.memory.slots import piece_places, section_views
from torchquorum.placement.layout import CONSTANT, Piece, Region
from torchquorum.reader.read_copy import AVERAGE, BUFFER, VARIABLE, ReadCopy
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor
from torchquorum.wire.messages import Plan
from torchquorum.wire.packing import Packing

Memory = list[list[torch.Tensor]]  # by optimizer, then by shard


class FlatReplica:
    """The regions of a run.

    Args:
        plan: The run's plan.
        replica: What they are shown as.

    Attributes:
        values: The trained variables.
        has_news: Whether something has changed since the last version.
        has_begun: Whether something has come.
        is_partial: Whether only what has changed since a version was asked for.
    """

    def __init__(self, plan: Plan, replica: ReadCopy) -> None:
        self._replica, self._plans = replica, plan.tracks()
        self._layouts = [of.layout() for of in self._plans]
        self._regions = [layout.trained for layout in self._layouts]
        self._constant_regions = [layout.constants for layout in self._layouts]
        self.values = _memory(self._regions)
        self._constants, self._averages = _memory(self._constant_regions), None
        self._versions = [[-1] * len(regions) for regions in self._regions]
        self._references = [[-1] * len(regions) for regions in self._regions]
        self._table_versions: dict[tuple[int, int, int], int] = {}
        self._packing = Packing(plan.buffers)
        self._compressors: dict[str, Compressor] = {}
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.has_news = self.has_begun = self.is_partial = False
        for track in range(len(self._plans)):
            self._show(VARIABLE, track, self._regions, self.values)
            self._show(VARIABLE, track, self._constant_regions, self._constants)

    # -- which version it is ------------------------------------------------------------------------------------------

    def versions_on(self, shard: int) -> list[int]:
        """Returns the version of each optimizer that is here of a shard; -1 for none."""
        return [versions[shard] for versions in self._versions]

    def references_on(self, shard: int) -> list[int]:
        """Returns the references of each optimizer on a shard."""
        return [references[shard] for references in self._references]

    def set_version(self, track: int, shard: int, version: int, reference: int = -1) -> None:
        """What is here of a shard is of this version."""
        self._versions[track][shard], self._references[track][shard] = version, reference
        self.has_begun = True

    def set_all(self, versions: list[int]) -> None:
        """All shards are of these versions."""
        for track, version in enumerate(versions):
            for shard in range(len(self._versions[track])):
                self.set_version(track, shard, version)

    def common_versions(self) -> list[int] | None:
        """Returns the version of each optimizer; None if shards differ."""
        return [v[0] for v in self._versions] if all(len(set(v)) == 1 for v in self._versions) else None

    def begin_at(self, versions: tuple[int, ...]) -> None:
        """Nothing is here, and only what has changed since these versions is wanted."""
        self.is_partial = True
        self.set_all(list(versions))
        for track, version in enumerate(versions):
            for shard in range(len(self._versions[track])):
                for number in range(len(self._plans[track].tables)):
                    self._table_versions[shard, track, number] = version

    def forget(self) -> None:
        """What is here is of no version: all of it is asked for again."""
        self.is_partial = False
        self._versions = [[-1] * len(versions) for versions in self._versions]
        self._table_versions.clear()

    def table_version(self, place: tuple[int, int, int]) -> int:
        """Returns the version of which the rows of a table are, by shard, optimizer and table; -1 for none."""
        return self._table_versions.get(place, -1)

    def set_table_version(self, place: tuple[int, int, int], version: int) -> None:
        """The rows of a table are of this version."""
        self._table_versions[place] = version

    # -- what comes ---------------------------------------------------------------------------------------------------

    def changed(self, track: int, variables: frozenset[int] | None = None, kind: str = VARIABLE) -> None:
        """Trained variables of an optimizer change: these, or all."""
        of = self._plans[track].variables
        names = [v.name for k, v in enumerate(of) if v.group != CONSTANT and (variables is None or k in variables)]
        self._replica.changes_at_next(kind, names)
        self.has_news = True

    def put_whole(self, track: int, shard: int, frame: Frame) -> None:
        """Takes all variables of a shard."""
        self.values[track][shard].copy_(frame_tensor(frame, self._regions[track][shard].size_bytes))
        self.changed(track)

    def put_some(self, track: int, shard: int, frame: Frame, chosen: frozenset[int]) -> None:
        """Takes some variables of a shard, which follow one another."""
        places = [place for place in piece_places(self._regions[track][shard]) if place[0].variable in chosen]
        given = frame_tensor(frame, sum(stop - start for _, start, stop in places))
        at = 0
        for _, start, stop in places:
            self.values[track][shard][start:stop] = given[at : at + stop - start]
            at += stop - start
        if places:
            self.changed(track, frozenset(piece.variable for piece, _, _ in places))
        self.has_news = True

    def add_difference(self, track: int, shard: int, frame: Frame, compress: str) -> None:
        """Takes a compressed difference to what is here."""
        if compress not in self._compressors:
            self._compressors[compress] = read_compressor(compress)
        region, given = self._regions[track][shard], torch.frombuffer(frame, dtype=torch.uint8)
        add_difference(region, self._compressors[compress], given, self.values[track][shard])
        self.changed(track)

    def put_constants(self, track: int, shard: int, frame: Frame) -> None:
        """Takes the variables of a shard that are not trained."""
        region = self._constant_regions[track][shard]
        self._constants[track][shard].copy_(frame_tensor(frame, region.size_bytes))
        names = [v.name for v in self._plans[track].variables if v.group == CONSTANT]
        self._replica.changes_at_next(VARIABLE, names)

    def put_averages(self, track: int, shard: int, frame: Frame) -> None:
        """Takes the moving averages of a shard."""
        if self._averages is None:
            self._averages = _memory(self._regions)
            for k, of in enumerate(self._plans):
                if of.average is not None:
                    self._show(AVERAGE, k, self._regions, self._averages)
        self._averages[track][shard].copy_(frame_tensor(frame, self._regions[track][shard].size_bytes))
        self.changed(track, kind=AVERAGE)

    @property
    def has_averages(self) -> bool:
        """Whether moving averages are here."""
        return self._averages is not None

    def put_buffers(self, frame: Frame) -> None:
        """Takes the model's buffers."""
        packed = frame_tensor(frame, self._packing.size_bytes).clone()
        for name, view in self._packing.views(packed).items():
            before = self._replica.values.get((BUFFER, name))
            self._replica.values[BUFFER, name] = view
            if before is None or not torch.equal(before, view):
                self._replica.changes_at_next(BUFFER, [name])
        self.has_news = True

    def assemble(self) -> None:
        """Brings the slices of variables together that lie on several shards."""
        for target, source in self._parts:
            target.copy_(source)
        self.has_news = False

    def _show(self, kind: str, track: int, regions: list[tuple[Region, ...]], memory: Memory) -> None:
        """Gives the replica a tensor for each variable."""
        of, found = self._plans[track].variables, dict[int, list[tuple[Piece, torch.Tensor]]]()
        for region, bytes_ in zip(regions[track], memory[track], strict=True):
            for section, view in zip(region.sections, section_views(region, bytes_), strict=True):
                for piece in section.pieces:
                    part = view[piece.offset : piece.offset + piece.numel]
                    found.setdefault(piece.variable, []).append((piece, part))
        for index, parts in found.items():
            variable = of[index]
            if len(parts) == 1 and parts[0][0].numel == variable.numel:
                whole = parts[0][1]
            else:
                whole = torch.empty(variable.numel, dtype=parts[0][1].dtype)
                self._parts += [(whole[piece.start : piece.stop], part) for piece, part in parts]
            self._replica.values[kind, variable.name] = whole.view(variable.shape)


def _memory(regions: list[tuple[Region, ...]]) -> Memory:
    return [[torch.zeros(region.size_bytes, dtype=torch.uint8) for region in each] for each in regions]
