"""The options of a session in groups, each checked when it is built, and what a task brings to a run.

Built by `tq.Session` and `tq.graph.GraphSession` from their arguments; read by every part of the session. What always holds: a group that
exists makes sense, and nothing in it changes afterwards. Options of devices are in `torchquorum.devices.options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from torchquorum.clock import Clock
from torchquorum.errors import ConfigError
from torchquorum.session.join import Task, say
from torchquorum.session.position import Resumable
from torchquorum.wire.packing import MODES as BUFFER_MODES
from torchquorum.wire.rpc import Patience
from torchquorum.worker.optimizer import Optimizer
from torchquorum.worker.row_reading import Reading


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """When the run is over: at a global step, after a number of steps, or after a time; None for no limit."""

    last_step: int | None = None
    num_steps: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("last_step", self.last_step), ("num_steps", self.num_steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"{name}={value!r}: must be a whole number, 1 or more; leave it out to train until the loop ends"
                )
        if self.last_step is not None and self.num_steps is not None:
            raise ConfigError(f"last_step={self.last_step} and num_steps={self.num_steps}: give one of the two")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ConfigError(f"max_seconds={self.max_seconds}: must be more than 0; leave it out for no limit")


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """When checkpoints are made, by seconds or by global steps (0 s: only at the end; None: the default), and how many are kept.

    `required`: a run whose last step cannot be saved has failed. `full_every`: of how many checkpoints one has all rows of tables.
    """

    every_s: float | None = None
    every_steps: int | None = None
    keep: int = 5
    required: bool = True
    full_every: int | None = None

    def __post_init__(self) -> None:
        if self.full_every is not None and self.full_every < 1:
            raise ConfigError(f"full_every={self.full_every}: must be 1 or more; 1 writes all rows each time")
        if self.every_s is not None and self.every_steps is not None:
            raise ConfigError(
                f"save_every_s={self.every_s} and save_every_steps={self.every_steps}: give one of the two"
            )
        if self.every_s is not None and self.every_s < 0:
            raise ConfigError(f"save_every_s={self.every_s}: must be 0 or more; 0 saves only at the end")
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"save_every_steps={self.every_steps}: must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """What the run continues from after a restart: its newest checkpoint, its journal (empty, `write` or `fsync`), or step 0 again.

    `accept_loss` lets a durable run go back behind what its workers were told.
    """

    restore: bool = True
    durable: str = ""
    start_afresh: bool = False
    accept_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class MemberOptions:
    """How a worker takes part: when it counts as dead, how many it waits for (None: see `tq.Session`), whose buffers count.

    `record`: the run is recorded, so that it can be replayed.
    """

    liveness_s: float = 5.0
    wait_for_workers: int | None = None
    buffers: str = "chief"
    record: bool = False

    def __post_init__(self) -> None:
        if self.liveness_s <= 0:
            raise ConfigError(f"liveness_s={self.liveness_s}: must be more than 0 seconds")
        if self.buffers not in BUFFER_MODES:
            raise ConfigError(f"buffers={self.buffers!r}: must be one of {', '.join(map(repr, BUFFER_MODES))}")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What one task brings to a run: its place in the cluster, what it trains, and its options.

    Attributes:
        logdir: The run's folder as every task understands it; None for none.
        patience: How long to wait for what.
        data: Sources whose position belongs to a checkpoint, by name.
        more_optimizers: The optimizers after the first.
        reading: How rows of tables are read, if the program says so.
    """

    task: Task
    model: nn.Module
    optimizer: Optimizer
    logdir: str | None = None
    patience: Patience = field(default_factory=Patience)
    stop: StopOptions = field(default_factory=StopOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    restore: RestoreOptions = field(default_factory=RestoreOptions)
    member: MemberOptions = field(default_factory=MemberOptions)
    data: Mapping[str, Resumable] = field(default_factory=dict)
    more_optimizers: Sequence[Optimizer] = ()
    reading: Reading | None = None

    def __post_init__(self) -> None:
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"optimizer={type(optimizer).__name__}: wrap it first: tq.Optimizer(optimizer, rule=tq.Sync())"
                )
        if isinstance(self.member.wait_for_workers, bool):
            raise ConfigError(
                f"wait_for_workers={self.member.wait_for_workers}: give the number of workers; all of them are task.num_workers"
            )
        if not 1 <= self.wait_for_workers <= self.task.num_workers:
            raise ConfigError(
                f"wait_for_workers={self.wait_for_workers}: the cluster has {self.task.num_workers} workers"
            )

    @property
    def clock(self) -> Clock:
        """Returns the task's clock."""
        return self.task.clock

    @property
    def optimizers(self) -> list[Optimizer]:
        """Returns all optimizers; `global_step` counts the first one's updates."""
        return [self.optimizer, *self.more_optimizers]

    @property
    def wait_for_workers(self) -> int:
        """Returns how many workers must have joined before training starts."""
        if self.member.wait_for_workers is not None:
            return self.member.wait_for_workers
        if self.task.cluster.elastic:
            return self.task.min_workers
        rounds = any(optimizer.rule.once_per_round for optimizer in self.optimizers)
        return self.task.num_workers if self.task.launched and rounds else 1

    def say(self, line: str) -> None:
        """Prints a line for people, with the task's name."""
        say(f"{self.task}: {line}")
