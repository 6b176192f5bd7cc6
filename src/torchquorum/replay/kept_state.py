"""The variables of a replay at a version, kept in memory: to go on from, to compare with a checkpoint, to write to a file.

Made by the replay's ps tasks. What always holds: what is kept does not change with later updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from torchquorum.formats.checkpoint_manifest import Manifest, Stored, by_tensor
from torchquorum.formats.stored_tensors import StoredTensors
from torchquorum.server.shard import Shard
from torchquorum.wire.messages import Plan


@dataclass
class KeptState(StoredTensors):
    """The whole state of a run at one version: what all shards have added.

    Attributes:
        version: The version.
        plan: The plan it was made with.
        pieces: Where every tensor is.
        values: The pieces by key, flat.
        scalars: The optimizer's numbers.
        settings: The options of the optimizer.
        shards: The shards that have added theirs.
    """

    version: int
    plan: Plan
    pieces: list[Stored] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    shards: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.where, self.tensors = f"what was kept of version {self.version}", {}

    def add(self, shard: Shard) -> None:
        """Adds a shard as it is now."""
        snapshot = shard.variables.snapshot()
        self.pieces += snapshot.pieces
        self.tensors = by_tensor(self.pieces)
        self.values |= {key: tensor.clone() for key, tensor in snapshot.tensors.items()}
        self.scalars |= msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot.scalars))
        shard.variables.snapshot_written()
        self.settings = shard.variables.update.settings
        self.shards.add(shard.index)

    @property
    def complete(self) -> bool:
        """Whether all shards are in it."""
        return len(self.shards) == self.plan.num_shards

    @property
    def manifest(self) -> Manifest:
        """Returns what a checkpoint of it would have."""
        return Manifest(
            step=self.version,
            num_ps=self.plan.num_shards,
            plan=msgspec.to_builtins(self.plan),
            scalars={"optimizer": self.scalars, "settings": self.settings},
            pieces=self.pieces,
            files={},
        )

    # -- read as a checkpoint is --------------------------------------------------------------------------------------

    def open_slice(self, piece: Stored) -> torch.Tensor:
        """Returns a piece."""
        return self.values[piece.key]

    def whole(self) -> dict[tuple[str, str, str], torch.Tensor]:
        """Returns every tensor, by kind, variable and state, in its own shape."""
        return {
            (kind, name, state): self.read(kind, name, state).view(pieces[0].spec.shape)
            for (kind, name, state), pieces in self.tensors.items()
        }
