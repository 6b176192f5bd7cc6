"""What a worker knows of the run: the version that it holds, its own steps, what the last answer said.

Kept by the link, which is one; written on the worker's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchquorum.wire.settings import Settings


@dataclass(eq=False, repr=False)
class RunView:
    """How far a worker is.

    Attributes:
        version: The version that the parameters hold; the cluster's global step.
        generation: Which creation of the variables that is of.
        local_step: How many gradients this worker has computed.
        lr: The learning rate of each parameter group for the next update, as the ps tasks have it.
        used_lr: Those of the update that made `version`, as far as this worker knows.
        settings: The run's settings, as this worker knows them, at their `revision`.
        assignments: How many times it has come to an assignment in this creation of the variables.
        stopped: Whether the run is over.
        kept: The generations that this one goes on from, each with the last of its versions that counts here.
        position: The worker's position in the checkpoint that the last answer came from, if it brought one.
    """

    version: int = 0
    generation: int = 0
    local_step: int = 0
    lr: list[float] = field(default_factory=lambda: [0.0])
    used_lr: list[float] = field(default_factory=lambda: [0.0])
    settings: Settings = field(default_factory=list)
    revision: int = -1
    assignments: int = 0
    stopped: bool = False
    kept: list[tuple[int, int]] = field(default_factory=list)
    position: dict[str, Any] | None = None

    def take_over(self, before: RunView) -> None:
        """Continues where another one, whose link was lost, stood."""
        self.local_step, self.version, self.generation = before.local_step, before.version, before.generation
        self.lr, self.used_lr, self.settings = before.lr, before.used_lr, before.settings
        self.assignments = before.assignments

    def lost_since(self, before: RunView) -> int:
        """Returns how many versions that another view has seen are not in this run's past; all, if the run began anew."""
        if self.generation == before.generation:
            return 0
        return max(0, before.version - dict(self.kept).get(before.generation, 0))
