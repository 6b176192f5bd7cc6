"""The values of the variables on one ps task, and everything that changes them: optimizer, constraints, moving averages.

Owned by the shard, which says when. What always holds: a version is written whole before it is published; what a reader has a
lease on is not written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchquorum.formats.stored_tensors import StoredTensors
from torchquorum.memory.slots import section_views
from torchquorum.server.given_state import GivenState
from torchquorum.server.mean_gradient import MeanGradient
from torchquorum.server.run_settings import resumed
from torchquorum.server.snapshot import SavedState, SavedTrack, ShardSnapshot, SnapshotBuilder, read_region
from torchquorum.server.versions import SAVING, Versions
from torchquorum.update.averages import Averages
from torchquorum.update.constraints import Constraints
from torchquorum.update.updater import Updater
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor
from torchquorum.wire.messages import Plan
from torchquorum.wire.settings import Settings, changes


class ShardVariables:
    """One shard's variables.

    Args:
        index: Which shard.
        plan: The run's plan.
        values: The first values of the trained variables.
        constants: Those of the others.
        version: The version that these are.
        state_slots: How many slots the optimizer's state has in shared memory; None for no sharing.

    Attributes:
        region: Where each trained variable stands.
        constants: The bytes of the variables that are not trained.
        versions: The slots with their values.
        update: The optimizer.
        averages: The moving averages, if the plan has some.
        mean: The mean gradient, for those who ask for it.
        revision: How often the optimizer's options were changed.
    """

    def __init__(
        self, index: int, plan: Plan, values: Frame, constants: Frame, *, version: int, state_slots: int | None
    ) -> None:
        self._index, self._plan, self._layout = index, plan, plan.layout()
        self.region = region = self._layout.trained[index]
        initial = frame_tensor(values, region.size_bytes)
        self.constants = bytes(frame_tensor(constants, self._layout.constants[index].size_bytes).numpy())
        self.versions = Versions(region, plan.num_workers, version)
        slot = self.versions.slots.bytes[self.versions.current]
        slot.copy_(initial)
        try:
            values_now = section_views(region, slot)
            self.update = Updater(region, plan.variables, plan.optimizer, plan.schedule, values_now, state_slots)
            self.averages = Averages(plan.average, values_now) if plan.average is not None else None
            self._constraints = Constraints(plan.after_update, self._layout, index)
        except Exception:
            self.versions.close()
            raise
        self.mean = MeanGradient(region, plan.variables)
        self.revision = 0

    def restore(self, reader: StoredTensors, saved: SavedTrack) -> None:
        """Takes settings, the optimizer's state and moving averages from a checkpoint."""
        settings = resumed(self._plan, saved.plan, saved.settings)
        self.update.change(changes(self.update.settings, settings))
        self.update.restore(SavedState(reader), saved.scalars, saved.version)
        if self.averages is not None and reader.averages().keys() & {v.name for v in self._plan.variables}:
            memory = read_region(reader, "average", self.region, self._layout.variables)
            self.averages.shadows = section_views(self.region, memory)

    def snapshot(self) -> ShardSnapshot:
        """Returns all of it as it is now; the current version's slot is kept until `snapshot_written`."""
        builder = SnapshotBuilder(self._layout, self._index, self.versions.version)
        slot = self.versions.lease(SAVING)
        builder.add_region("variable", self.region, self.versions.slots.sections[slot], copy=False)
        builder.snapshot.trained = list(builder.snapshot.tensors)
        constants = self._layout.constants[self._index]
        memory = frame_tensor(self.constants, constants.size_bytes)
        builder.add_region("variable", constants, section_views(constants, memory), copy=False)
        if self.averages is not None:
            builder.add_region("average", self.region, self.averages.shadows, copy=True)
        for piece, name, values in self.update.states():
            of = self._plan.variables[piece.variable]
            whole = values.numel() == piece.numel
            builder.add(
                "optimizer",
                piece.variable,
                values.clone(),
                piece.start if whole else 0,
                state=name,
                shape=of.shape if whole else values.shape,
            )
        builder.snapshot.scalars = self.update.scalars()
        return builder.snapshot

    def snapshot_written(self) -> None:
        """The snapshot is on disk: its slot is free again."""
        self.versions.forget(SAVING)

    # -- the next version ---------------------------------------------------------------------------------------------

    def change(self, settings: Settings) -> None:
        """The optimizer's options change with the update that is about to be made."""
        if settings:
            self.update.change(settings)
            self.revision += 1

    def load(self, state: GivenState) -> None:
        """The optimizer's state is this one from now on."""
        self.update.load(state, state.ref.scalars)

    def make(
        self,
        gradients: Sequence[Sequence[torch.Tensor]],
        absent: frozenset[int],
        version: int,
        weights: Sequence[float] = (),
    ) -> tuple[Sequence[torch.Tensor], int]:
        """Makes a version from the mean of gradients, weighted where there are weights.

        Returns the mean, and the slot with the version, to be published.
        """
        slots = self.versions.slots
        slot = self.versions.next_slot()
        mean = self.update.apply(
            slots.sections[self.versions.current], slots.sections[slot], gradients, absent, weights
        )
        self._constraints.apply(slots.sections[slot])
        if self.mean.wanted:
            self.mean.keep(version, mean, absent)
        return mean, slot

    def put(self, memory: torch.Tensor, variables: Sequence[int]) -> int:
        """Writes the current version into a slot, but with what stands in memory for these variables. Returns the slot."""
        slots, chosen = self.versions.slots, frozenset(variables)
        memory = memory if variables else slots.bytes[self.versions.current]
        slot = self.versions.next_slot()
        old, new = slots.sections[self.versions.current], slots.sections[slot]
        for section, before, after, given in zip(
            self.region.sections, old, new, section_views(self.region, memory), strict=True
        ):
            after.copy_(before)
            for piece in section.pieces:
                if piece.variable in chosen:
                    stop = piece.offset + piece.numel
                    after[piece.offset : stop].copy_(given[piece.offset : stop])
        self.update.pass_over()
        return slot

    def publish(self, slot: int, version: int) -> None:
        """The slot holds the version: it is the current one from now on."""
        self.versions.publish(slot, version)
        if self.averages is not None:
            self.averages.follow(self.versions.slots.sections[slot], version)

    def close(self) -> None:
        """Releases the memory."""
        self.update.state.close()
        self.versions.close()
