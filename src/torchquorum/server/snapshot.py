"""A shard as it goes to disk and comes back: its variables, optimizer state and averages, named by variable.

Called by the ps thread to take a snapshot between two updates, and to make a shard from a checkpoint. What always holds: a
snapshot does not change with later updates (the version's slot is leased, the rest is copied), and it says nothing about
how many ps tasks there are, so any number of them can be made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchquorum.formats.checkpoint import CheckpointReader
from torchquorum.formats.checkpoint_manifest import CheckpointError, Manifest, Spec, Stored, StoredTable, torch_dtype
from torchquorum.formats.checkpoint_write import part_name, tensor_key
from torchquorum.formats.storage import Location
from torchquorum.formats.stored_tensors import StoredTensors
from torchquorum.memory.slots import section_views
from torchquorum.placement.layout import Layout, Region, Variable
from torchquorum.server.row_chains import RowChain
from torchquorum.update.table_snapshot import TableSnapshot
from torchquorum.update.updater import Updater
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import tensor_frame
from torchquorum.wire.messages import Plan, StatePiece, StateRef
from torchquorum.wire.settings import Settings


@dataclass(slots=True)
class ShardSnapshot:
    """What one shard writes: its tensors by key, where each belongs, the optimizer's numbers; its rows, and their tables.

    `trained` are the keys of the variables that are trained.
    """

    version: int
    tensors: dict[str, torch.Tensor]
    pieces: list[Stored]
    scalars: dict[str, Any]
    rows: list[TableSnapshot] = field(default_factory=list)
    tables: list[StoredTable] = field(default_factory=list)
    chain: RowChain | None = None
    trained: list[str] = field(default_factory=list)

    def nonfinite(self) -> list[str]:
        """Returns the trained variables that hold NaN or infinity."""
        names = {piece.key: piece.variable for piece in self.pieces}
        return [names[key] for key in self.trained if not is_finite(self.tensors[key])]

    def add(self, other: ShardSnapshot) -> None:
        """Adds what the same shard has of another optimizer: no variable is in two of them."""
        self.tensors |= other.tensors
        self.pieces += other.pieces
        self.scalars |= other.scalars
        self.trained += other.trained


def is_finite(values: torch.Tensor) -> bool:
    """Whether values hold neither NaN nor infinity; in one pass, without a copy."""
    if not values.is_floating_point() or values.numel() == 0:
        return True
    return all(bool(torch.isfinite(edge)) for edge in torch.aminmax(values))


@dataclass(frozen=True, slots=True)
class SavedTrack:
    """What a checkpoint says of one optimizer: its plan, version, settings, and the numbers in its state."""

    plan: Mapping[str, Any]
    version: int
    settings: Settings | None
    scalars: dict[str, Any]

    @classmethod
    def of(cls, manifest: Manifest, track: int) -> SavedTrack:
        """Returns what a checkpoint says of an optimizer, which it has."""
        scalars = manifest.scalars.get("optimizer", {})
        if track == 0:
            return cls(manifest.plan, manifest.step, manifest.scalars.get("settings"), scalars)
        saved = manifest.scalars["more"][track - 1]
        return cls(manifest.plan["more"][track - 1], saved["version"], saved["settings"], scalars)


class SnapshotBuilder:
    """Collects the tensors of one snapshot."""

    def __init__(self, layout: Layout, index: int, version: int) -> None:
        self._variables = layout.variables
        self._file = part_name(index, layout.num_shards)
        self.snapshot = ShardSnapshot(version, {}, [], {})

    def add(
        self, kind: Any, variable: int, values: torch.Tensor, start: int, *, state: str = "", shape: Any = None
    ) -> None:
        """Adds elements of a tensor, flat, from element `start` on."""
        of = self._variables[variable]
        key = tensor_key(kind, of.name, state, start)
        flat = values.reshape(-1)
        self.snapshot.tensors[key] = flat
        self.snapshot.pieces.append(
            Stored(
                kind=kind,
                variable=of.name,
                state=state,
                file=self._file,
                key=key,
                start=start,
                stop=start + flat.numel(),
                shape=tuple(of.shape if shape is None else shape),
                dtype=str(flat.dtype).removeprefix("torch."),
            )
        )

    def add_region(self, kind: Any, region: Region, sections: list[torch.Tensor], *, copy: bool) -> None:
        """Adds every piece of a region."""
        for section, memory in zip(region.sections, sections, strict=True):
            kept = memory.clone() if copy else memory
            for piece in section.pieces:
                self.add(kind, piece.variable, kept[piece.offset : piece.offset + piece.numel], piece.start)


class SavedState:
    """A checkpoint's optimizer state, as `Update.restore` asks for it."""

    def __init__(self, reader: StoredTensors) -> None:
        self._reader = reader

    def states(self, variable: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each state of a variable."""
        return {n: (tuple(s.shape), torch_dtype(s.dtype)) for n, s in self._reader.states(variable).items()}

    def elements(self, variable: str, state: str, start: int, stop: int) -> torch.Tensor:
        """Returns the elements [start, stop) of a state, flat."""
        return self._reader.read("optimizer", variable, state, start, stop)


def state_frame(update: Updater) -> tuple[StateRef, Frame]:
    """Returns an optimizer's state as it is now, for a worker that asks for it: what there is, and all of it in one frame."""
    ref, parts = StateRef([], update.scalars()), list[bytes]()
    for piece, name, values in update.states():
        whole = values.numel() != piece.numel  # of a shape of its own: it is not cut
        dtype, flat = str(values.dtype).removeprefix("torch."), values.detach().reshape(-1).contiguous()
        shape = tuple(values.shape) if whole else ()
        ref.pieces.append(StatePiece(piece.variable, name, 0 if whole else piece.start, flat.numel(), shape, dtype))
        parts.append(bytes(tensor_frame(flat.view(torch.uint8))))
    return ref, b"".join(parts)


def read_region(reader: StoredTensors, kind: Any, region: Region, variables: tuple[Variable, ...]) -> torch.Tensor:
    """Returns the memory of a region, read from a checkpoint."""
    memory = torch.zeros(region.size_bytes, dtype=torch.uint8)
    for section, values in zip(region.sections, section_views(region, memory), strict=True):
        for piece in section.pieces:
            of = variables[piece.variable]
            expect = Spec(tuple(of.shape), of.dtype)
            out = values[piece.offset : piece.offset + piece.numel]
            reader.read(kind, of.name, "", piece.start, piece.stop, expect=expect, out=out)
    return memory


def frames_of(reader: StoredTensors, plan: Plan, index: int) -> tuple[memoryview, memoryview]:
    """Returns what a Create would have carried for this shard: its variables and its constants."""
    layout = plan.layout()
    regions = layout.trained[index], layout.constants[index]
    values, constants = (read_region(reader, "variable", region, layout.variables) for region in regions)
    return tensor_frame(values), tensor_frame(constants)


def check_same_tables(manifest: Manifest, plan: Plan, path: Location) -> None:
    """Raises CheckpointError if a checkpoint has other tables."""
    here = {(t.name, t.dim, t.dtype, t.optimizer) for t in plan.every_table}
    there = {(t.name, t.dim, t.dtype, t.optimizer) for t in manifest.tables}
    if here != there:
        only_there, only_here = (
            ", ".join(f"{name} [{dim}] {dtype} {optimizer}" for name, dim, dtype, optimizer in sorted(found)[:5])
            or "none"
            for found in (there - here, here - there)
        )
        raise CheckpointError(
            f"{path} holds other tables of rows: only there {only_there}; only here {only_here}; give another logdir, or the program "
            "that made it"
        )


def check_same_model(manifest: Manifest, reader: CheckpointReader, plan: Plan) -> None:
    """Raises CheckpointError if a checkpoint is of another model, or was made with other optimizers."""
    check_same_tables(manifest, plan, reader.path)
    plans = plan.tracks()
    specs = {v.name: Spec(tuple(v.shape), v.dtype) for of in plans for v in of.variables}
    here, there = set(specs), set(reader.variables())
    if here != there:
        raise CheckpointError(
            f"{reader.path} holds another model: only there {sorted(there - here)[:5]}, only here {sorted(here - there)[:5]}; "
            "give another logdir, or the program that made it"
        )
    unequal = [
        f"{name} is {spec} there and {specs[name]} here"
        for name, spec in reader.variables().items()
        if spec != specs[name]
    ]
    if unequal:
        more = f", and {len(unequal) - 5} more" if len(unequal) > 5 else ""
        raise CheckpointError(
            f"{reader.path} holds another model: {'; '.join(unequal[:5])}{more}; give another logdir, or the program that made it"
        )
    saved = [manifest.plan, *manifest.plan.get("more", [])]
    names = [of.get("optimizer", {}).get("name", "") for of in saved]
    ours = [of.optimizer.name for of in plans]
    if len(names) != len(ours) or any(theirs and theirs != name for theirs, name in zip(names, ours, strict=True)):
        raise CheckpointError(
            f"{reader.path} was made with {', '.join(names)}, this run uses {', '.join(ours)}; give another logdir, or "
            f"{'that optimizer' if len(names) == 1 else 'those optimizers, in that order'}"
        )
    trained = {v["name"]: k for k, of in enumerate(saved) for v in of.get("variables", []) if v.get("group", 0) >= 0}
    trained |= {table["name"]: k for k, of in enumerate(saved) for table in of.get("tables", [])}
    moved = [
        each.name
        for k, of in enumerate(plans)
        for each in (*of.variables, *of.tables)
        if trained.get(each.name, k) != k
    ]
    if moved:
        raise CheckpointError(
            f"{reader.path}: {', '.join(moved[:5])} belonged to another optimizer there; give another logdir, or the optimizers as "
            "they were"
        )
