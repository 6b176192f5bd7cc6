"""What a worker knows of the run: the versions that it holds, its own steps, what the last answer said.

Kept by the link, which is one; written on the worker's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchquorum.wire.settings import Settings


@dataclass(eq=False, repr=False)
class TrackView:
    """What a worker knows of one optimizer.

    Attributes:
        version: The version that its parameters hold.
        lr: The learning rate of each parameter group for the next update, as the ps tasks have it.
        used_lr: Those of the update that made `version`, as far as this worker knows.
        settings: The run's settings, as this worker knows them, at their `revision`.
        pace_s: How long the fastest worker takes for a local step; 0 if that is not known.
    """

    version: int = 0
    lr: list[float] = field(default_factory=lambda: [0.0])
    used_lr: list[float] = field(default_factory=lambda: [0.0])
    settings: Settings = field(default_factory=list)
    revision: int = -1
    pace_s: float = 0.0


@dataclass(eq=False, repr=False)
class RunView:
    """How far a worker is.

    Attributes:
        tracks: What it knows of each optimizer.
        in_step: The optimizers whose versions say where it stands, see `torchquorum.wire.plan.Plan.in_step`.
        generation: Which creation of the variables the versions are of.
        local_step: How many gradients this worker has computed.
        assignments: How many times it has come to an assignment in this creation of the variables.
        stopped: Whether the run is over.
        kept: The generations that this one goes on from, each with the last of its versions that counts here.
        position: The worker's position in the checkpoint that the last answer came from, if it brought one.
    """

    tracks: list[TrackView] = field(default_factory=lambda: [TrackView()])
    in_step: list[int] = field(default_factory=lambda: [0])
    generation: int = 0
    local_step: int = 0
    assignments: int = 0
    stopped: bool = False
    kept: list[tuple[int, int]] = field(default_factory=list)
    position: dict[str, Any] | None = None

    @property
    def version(self) -> int:
        """Returns the version of the first optimizer's parameters: the cluster's global step."""
        return self.tracks[0].version

    @version.setter
    def version(self, version: int) -> None:
        self.tracks[0].version = version

    @property
    def lr(self) -> list[float]:
        """Returns the first optimizer's learning rates for the next update."""
        return self.tracks[0].lr

    @property
    def place(self) -> int:
        """Returns where this worker stands: the same number for all workers that hold the same versions of what has rounds."""
        return sum(self.tracks[k].version for k in self.in_step)

    def have_tracks(self, count: int, in_step: list[int]) -> None:
        """The run has so many optimizers."""
        while len(self.tracks) < count:
            self.tracks.append(TrackView())
        self.in_step = in_step

    def take_over(self, before: RunView) -> None:
        """Continues where another one, whose link was lost, stood."""
        self.local_step, self.generation, self.assignments = before.local_step, before.generation, before.assignments
        self.in_step = before.in_step
        self.tracks = [TrackView(t.version, t.lr, t.used_lr, t.settings) for t in before.tracks]

    @property
    def total(self) -> int:
        """Returns how many updates of all optimizers are in what this worker holds."""
        return sum(track.version for track in self.tracks)

    def lost_since(self, before: RunView) -> int:
        """Returns how many versions that another view has seen are not in this run's past; all, if the run began anew."""
        if self.generation == before.generation:
            return 0
        return max(0, before.total - dict(self.kept).get(before.generation, 0))
