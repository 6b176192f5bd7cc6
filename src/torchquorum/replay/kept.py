"""The variables of a replay at a version, kept in memory: to go on from, to compare with a checkpoint, to write to a file.

Made by the replay's ps tasks. What always holds: what is kept does not change with later updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from torchquorum.formats.checkpoint_manifest import Manifest, Spec, Stored, torch_dtype
from torchquorum.server.shard import Shard
from torchquorum.wire.messages import Plan


@dataclass(slots=True)
class KeptState:
    """The whole state of a run at one version: what all shards have added.

    Attributes:
        version: The version.
        plan: The plan it was made with.
        pieces: Where every tensor is.
        tensors: The tensors by key, flat.
        scalars: The optimizer's numbers.
        settings: The options of the optimizer.
        shards: The shards that have added theirs.
    """

    version: int
    plan: Plan
    pieces: list[Stored] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    shards: set[int] = field(default_factory=set)

    def add(self, shard: Shard) -> None:
        """Adds a shard as it is now."""
        snapshot = shard.variables.snapshot()
        self.pieces += snapshot.pieces
        self.tensors |= {key: tensor.clone() for key, tensor in snapshot.tensors.items()}
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

    # -- as a checkpoint's reader -------------------------------------------------------------------------------------

    def read(
        self,
        kind: str,
        variable: str,
        state: str = "",
        start: int = 0,
        stop: int | None = None,
        *,
        expect: Spec | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns elements of a tensor, flat, as `CheckpointReader.read` does."""
        found = [p for p in self.pieces if (p.kind, p.variable, p.state) == (kind, variable, state)]
        assert found, (kind, variable, state)
        whole = torch.cat([self.tensors[p.key] for p in sorted(found, key=lambda p: p.start)])
        values = whole[start:stop]
        if out is not None:
            out.copy_(values)
            return out
        return values

    def states(self, variable: str) -> dict[str, Spec]:
        """Returns the shape and dtype of each state of a variable."""
        found = [p for p in self.pieces if p.kind == "optimizer" and p.variable == variable]
        return {p.state: Spec(tuple(p.shape), p.dtype) for p in found}

    def averages(self) -> bool:
        """Whether it has moving averages."""
        return any(p.kind == "average" for p in self.pieces)

    def whole(self) -> dict[tuple[str, str, str], torch.Tensor]:
        """Returns every tensor, by kind, variable and state, in its own shape."""
        found: dict[tuple[str, str, str], torch.Tensor] = {}
        for piece in self.pieces:
            key = piece.kind, piece.variable, piece.state
            if key not in found:
                values = self.read(*key)
                found[key] = values.to(torch_dtype(piece.dtype)).view(tuple(piece.shape))
        return found
