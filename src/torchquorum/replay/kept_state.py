"""The variables of a replay at a version, kept in memory: to go on from, to compare with a checkpoint, to write to a file.

Made by the replay's ps tasks. What always holds: what is kept does not change with later updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from torchquorum.formats.checkpoint_manifest import Manifest, Stored, StoredTable, by_tensor
from torchquorum.formats.row_file import KEYS, SIGHTED, TIMES, VALUES
from torchquorum.formats.stored_tensors import StoredTensors
from torchquorum.server.shard import Shard
from torchquorum.server.shard_tables import ShardTables
from torchquorum.update.table_snapshot import TableSnapshot
from torchquorum.wire.messages import Plan
from torchquorum.wire.settings import Settings

Columns = dict[str, torch.Tensor]


@dataclass
class KeptState(StoredTensors):
    """The whole state of a run at one place: what all shards have added.

    Attributes:
        versions: The version of each optimizer.
        plan: The plan it was made with.
        pieces: Where every tensor is.
        values: The pieces by key, flat.
        scalars: The optimizers' numbers.
        settings: The options of each optimizer.
        tables: What there is of each table on each shard.
        columns: The rows of these, by the shard and the table.
        shards: The shards that have added theirs.
    """

    versions: list[int]
    plan: Plan
    pieces: list[Stored] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    settings: list[Settings] = field(default_factory=list)
    tables: list[StoredTable] = field(default_factory=list)
    columns: dict[tuple[str, str], Columns] = field(default_factory=dict)
    shards: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.where, self.tensors = f"what was kept of version {self.versions[0]}", {}

    def add(self, shard: Shard) -> None:
        """Adds a shard as it is now."""
        snapshot = shard.snapshot()
        self.pieces += snapshot.pieces
        self.tensors = by_tensor(self.pieces)
        self.values |= {key: tensor.clone() for key, tensor in snapshot.tensors.items()}
        self.scalars |= msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot.scalars))
        shard.snapshot_written()
        self.settings = [track.variables.update.settings for track in shard.tracks]
        for track in shard.tracks:
            file = str(shard.index)
            rows, stored = track.tables.snapshot([file])
            self.tables += stored
            for table in rows:
                self.columns[file, table.name] = _all_rows(table)
        self.shards.add(shard.index)

    @property
    def complete(self) -> bool:
        """Whether all shards are in it."""
        return len(self.shards) == self.plan.num_shards

    @property
    def manifest(self) -> Manifest:
        """Returns what a checkpoint of it would have."""
        more = [
            {"name": name, "version": version, "settings": settings}
            for name, version, settings in zip(self.plan.names, self.versions, self.settings, strict=True)
        ][1:]
        return Manifest(
            step=self.versions[0],
            num_ps=self.plan.num_shards,
            plan=msgspec.to_builtins(self.plan),
            scalars={"optimizer": self.scalars, "settings": self.settings[0], **({"more": more} if more else {})},
            pieces=self.pieces,
            tables=self.tables,
            files={},
        )

    # -- read as a checkpoint is --------------------------------------------------------------------------------------

    def open_slice(self, piece: Stored) -> torch.Tensor:
        """Returns a piece."""
        return self.values[piece.key]

    def rows(self, file: str, table: str) -> Iterator[Columns]:
        """Yields a table's rows on a shard, some at a time."""
        yield self.columns[file, table]

    def whole(self) -> dict[tuple[str, str, str], torch.Tensor]:
        """Returns every tensor, by kind, variable and state, in its own shape."""
        return {
            (kind, name, state): self.read(kind, name, state).view(pieces[0].spec.shape)
            for (kind, name, state), pieces in self.tensors.items()
        }

    def variables(self) -> dict[str, torch.Tensor]:
        """Returns every variable by its name; of a table, which keys have rows, and these."""
        found = {name: values for (kind, name, _), values in self.whole().items() if kind == "variable"}
        for name, columns in whole_tables(self, self.manifest, self.plan).items():
            found |= {f"{name}/{column}": columns[column] for column in (KEYS, VALUES)}
        return found


def whole_tables(reader: StoredTensors, manifest: Manifest, plan: Plan) -> dict[str, Columns]:
    """Returns all rows of each table, in the order of their keys, and what belongs to them, whatever ps tasks they were on."""
    found: dict[str, Columns] = {}
    for of in plan.tracks():
        tables = ShardTables(msgspec.structs.replace(of, num_shards=1), 0)
        tables.restore(reader, manifest)
        for table in tables.tables:
            whole = _all_rows(table.snapshot())
            order = {name: torch.argsort(whole[name]) for name in (KEYS, SIGHTED) if name in whole}
            found[table.spec.name] = {
                name: values.index_select(0, order[SIGHTED if name in (SIGHTED, TIMES) else KEYS])
                for name, values in whole.items()
            }
    return found


def _all_rows(table: TableSnapshot) -> Columns:
    """Returns all columns of a table as it is now."""
    parts: dict[str, list[torch.Tensor]] = {}
    for chunk in table.chunks():
        for name, values in chunk.items():
            parts.setdefault(name, []).append(torch.tensor(values))
    empty = {name: torch.from_numpy(np.empty(shape, dtype)) for name, (dtype, shape) in table.columns().items()}
    return empty | {name: torch.cat(of) for name, of in parts.items()}
