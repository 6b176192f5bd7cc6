"""What a run is made of, as it travels: the plan that all tasks must agree on, and references to memory and files.

Parts of messages, see `torchquorum.wire.messages`, which has these names too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torchquorum.placement import Layout, Variable, place
from torchquorum.rules import Rule


class OptimizerSpec(msgspec.Struct):
    """An optimizer as it travels: a class name in torch.optim and the arguments of each parameter group."""

    name: str
    groups: list[dict[str, Any]]


class ScheduleSpec(msgspec.Struct):
    """A learning-rate schedule as it travels: a class name in torch.optim.lr_scheduler (or ours) and its arguments."""

    name: str
    arguments: dict[str, Any]


class AverageSpec(msgspec.Struct):
    """Exponential moving averages of the variables, kept on the ps tasks."""

    decay: float
    num_updates: bool


class AfterSpec(msgspec.Struct):
    """What is done to variables after every update, as it travels: a name and its numbers; `only` names some of the variables."""

    name: str
    arguments: dict[str, Any]
    only: list[str] = []


class BufferSpec(msgspec.Struct, frozen=True):
    """A buffer of the model, such as a running mean: its name, shape, and dtype as torch names it without the prefix."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


class InitSpec(msgspec.Struct, frozen=True):
    """What a row begins with, as it travels: see `torchquorum.update.row_inits`."""

    name: str
    numbers: dict[str, float] = {}


class TableSpec(msgspec.Struct, kw_only=True):
    """A table: a variable whose rows are pulled and pushed by key.

    Attributes:
        name: The parameter's, or the module's, qualified name.
        dim: How wide a row is.
        dtype: Of its rows, as torch names it.
        rows: Keys are from 0 to one less; 0 for any int64.
        is_fixed: Whether all rows are there from the beginning, as the chief's module has them.
        group: The parameter group whose options hold; CONSTANT for `options`.
        optimizer: The name of its row optimizer.
        options: Those of a table that is in no parameter group.
        init: What a row begins with.
        seed: Of the initial rows.
        touching: Whether a row's gradient is averaged over those workers that touch it, not over all.
        admit: After how many sightings a key gets a row.
        ttl_steps: After how many updates without it a row goes; 0 for never.
        ttl_s: The same in seconds.
        capacity: How many rows there may be, on all ps tasks; 0 for no limit.
    """

    name: str
    dim: int
    dtype: str = "float32"
    rows: int = 0
    is_fixed: bool = False
    group: int = 0
    optimizer: str = "SGD"
    options: dict[str, Any] = {}
    init: InitSpec = InitSpec("normal")
    seed: int = 0
    touching: bool = False
    admit: int = 1
    ttl_steps: int = 0
    ttl_s: float = 0.0
    capacity: int = 0


class OptimizerPlan(msgspec.Struct, kw_only=True):
    """What the ps tasks need to know of one optimizer: its variables, its tables, its rule."""

    variables: list[Variable]
    optimizer: OptimizerSpec
    rule: Rule
    schedule: ScheduleSpec | None = None
    average: AverageSpec | None = None
    after_update: list[AfterSpec] = []
    compress: str = ""
    placement: str = "round_robin"
    slice_bytes: int | None = None
    tables: list[TableSpec] = []


class TrackSpec(OptimizerPlan, kw_only=True):
    """One more optimizer of a run."""

    name: str


class Plan(OptimizerPlan, kw_only=True):
    """All that the ps tasks need to know of a run; the chief makes it.

    What it has of an optimizer is of the first, `more` are the others: see `tracks`.
    """

    num_shards: int
    num_workers: int
    last_step: int | None = None
    liveness_s: float = 5.0
    logdir: str | None = None
    keep: int = 5
    durable: str = ""
    buffers: list[BufferSpec] = []
    buffers_mode: str = "local"
    tied: dict[str, str] = {}
    min_workers: int = 0
    must_save: bool = True
    save_s: float = 0.0
    record: bool = False
    name: str = ""
    more: list[TrackSpec] = []
    full_every: int = 8

    def tracks(self) -> list[Plan]:
        """Returns a plan for each optimizer, as if it were the only one: the first has the constants and the last step."""
        if not self.more:
            return [self]
        first = msgspec.structs.replace(self, more=[])
        bare = msgspec.structs.replace(first, last_step=None)
        return [first, *(msgspec.structs.replace(bare, **msgspec.structs.asdict(spec)) for spec in self.more)]

    @property
    def every_table(self) -> list[TableSpec]:
        """Returns the tables of all optimizers, in their order."""
        return [*self.tables, *(table for spec in self.more for table in spec.tables)]

    @property
    def names(self) -> list[str]:
        """Returns what the optimizers are called; the only one has no name."""
        return [self.name, *(spec.name for spec in self.more)]

    def naming(self, track: int) -> dict[str, Any]:
        """Returns what the ledger says of an event that concerns one of several optimizers: its name, and which one unless the first."""
        return {"optimizer": self.names[track], **({"track": track} if track else {})} if self.more else {}

    @property
    def rules(self) -> list[Rule]:
        """Returns the rules of the optimizers."""
        return [self.rule, *(spec.rule for spec in self.more)]

    @property
    def in_step(self) -> list[int]:
        """Returns the optimizers whose versions say where a worker stands: those whose rule has rounds, or else the first."""
        return [k for k, rule in enumerate(self.rules) if rule.once_per_round] or [0]

    @property
    def elastic(self) -> bool:
        """Whether workers may come and go: `num_workers` is how many places there are, `min_workers` who must be there."""
        return 0 < self.min_workers < self.num_workers

    def layout(self) -> Layout:
        """Returns the placement of the variables, the same on every task."""
        return place(self.variables, self.num_shards, strategy=self.placement, slice_bytes=self.slice_bytes)


class JournalRef(msgspec.Struct):
    """What of the journal belongs to a creation: the chief finds out for all shards.

    Attributes:
        version: The version that all shards have, to be restored.
        generation: The generation of the checkpoint.
        after: The generation that the new one goes on from.
        at: When the new generation begins, in nanoseconds since the epoch.
        kept: The generations that are in its past, each with the last of its versions that is.
        step: The global step there. The versions above count the updates of all optimizers.
    """

    version: int
    generation: int
    after: int
    at: int
    kept: list[tuple[int, int]] = []
    step: int = 0


class MeanPiece(msgspec.Struct, array_like=True):
    """Part of a variable's mean gradient: the variable's name, where the part begins, and how many numbers follow."""

    name: str
    start: int
    count: int


class StatePiece(msgspec.Struct, array_like=True):
    """Part of the optimizer's state of a variable, flat: which variable and state, where the part begins, the state's shape and dtype."""

    variable: int
    state: str
    start: int
    count: int
    shape: tuple[int, ...]
    dtype: str


class StateRef(msgspec.Struct):
    """A shard's optimizer state: what lies in the frame that follows, in this order, and its numbers by variable and name."""

    pieces: list[StatePiece]
    scalars: dict[str, dict[str, Any]]


class MemoryRef(msgspec.Struct):
    """Shared memory of another process on this host: open file `fd` of process `pid`, cut into slots."""

    pid: int
    fd: int
    size_bytes: int
    num_slots: int


class TrackMemory(msgspec.Struct, array_like=True):
    """A worker's memory for the gradients of one more optimizer, and whether it can make updates of it by itself."""

    gradients: MemoryRef | None
    fastpath: bool = False


class TrackValues(msgspec.Struct, array_like=True):
    """What is assigned of one more optimizer: values of these variables, at `version`, and with `state` the state and its settings."""

    version: int
    variables: list[int]
    state: bool = False
    settings: list[dict[str, Any]] = []


class ShareSpec(msgspec.Struct, frozen=True):
    """Which data is shared out, in which order: the same for all workers, or they would not mean the same batches.

    Attributes:
        name: Which share of the session.
        rows: How many rows the data has.
        batch_size: How many of them are in a batch.
        batches: How many batches are in an epoch.
        epochs: How many epochs there are; None for no end.
        seed: Of the order of the rows; -1 where they are not shuffled.
        by_epoch: The program goes from epoch to epoch by itself: `epochs` grows.
    """

    name: str
    rows: int
    batch_size: int
    batches: int
    epochs: int | None
    seed: int
    by_epoch: bool = False
