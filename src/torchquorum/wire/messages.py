"""What tasks say to each other. One struct per message; docs/protocol.md is the same table in prose.

Shared by server and worker, which share nothing else. Structs are arrays on the wire, with the class name as tag; tensors
never stand in them but follow as raw frames or lie in shared memory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torchquorum.version import __version__
from torchquorum.wire.plan import (
    AfterSpec as AfterSpec,
)
from torchquorum.wire.plan import (
    AverageSpec as AverageSpec,
)
from torchquorum.wire.plan import (
    BufferSpec as BufferSpec,
)
from torchquorum.wire.plan import (
    JournalRef as JournalRef,
)
from torchquorum.wire.plan import (
    MeanPiece as MeanPiece,
)
from torchquorum.wire.plan import (
    MemoryRef as MemoryRef,
)
from torchquorum.wire.plan import (
    OptimizerSpec as OptimizerSpec,
)
from torchquorum.wire.plan import (
    Plan as Plan,
)
from torchquorum.wire.plan import (
    ScheduleSpec as ScheduleSpec,
)
from torchquorum.wire.plan import (
    ShareSpec as ShareSpec,
)
from torchquorum.wire.plan import (
    StatePiece as StatePiece,
)
from torchquorum.wire.plan import (
    StateRef as StateRef,
)

PROTOCOL = 7
PACKAGE = __version__
STANDS_IN = "stands in"  # the reason of an answer to Assign that asks a worker for its own values
CREATION = "the chief to create the variables"  # what a join waits for at a ps that holds none


def refuse_protocol(who: str, protocol: int, package: str, us: str) -> str:
    """Returns what to tell a task that speaks another protocol than `us`."""
    said = f" (torchquorum {package[:40]})" if package else ""
    return (
        f"{who[:80]} speaks protocol {protocol}{said}, {us} speaks {PROTOCOL} (torchquorum {PACKAGE}); "
        "install the same torchquorum on both"
    )


class Message(msgspec.Struct, array_like=True, tag=True):
    """The base of all messages."""


# -- worker to ps ---------------------------------------------------------------------------------------------------------


class Hello(Message):
    """The first message of a task on a connection. Answered by Welcome. `package` is the version of torchquorum."""

    protocol: int
    task: str
    incarnation: int
    host: str
    pid: int
    package: str = ""


class Create(Message):
    """The chief's plan; frames: the initial trained values and constants of this shard. Answered by Created.

    With `restore`, the path of a checkpoint, those are left out: the ps reads its shard from there. To shard 0 the model's
    buffers follow in a further frame, if the plan has any. `generation` names this
    creation on all shards; `replace` says to give up variables that are there, because another ps has lost its own.
    `journal` says how far the updates after that checkpoint are to be made again from the journal; nothing if there are none.
    With `only_existing` nothing is created: a ps that was restarted since it said that it has variables refuses.
    """

    plan: Plan
    restore: str | None = None
    generation: int = 0
    replace: bool = False
    journal: JournalRef | None = None
    only_existing: bool = False


class Join(Message):
    """A worker is ready to compute. To shard 0 with the plan it expects, to the others without. Answered by Variables."""

    worker: int
    incarnation: int
    request: int
    gradients: MemoryRef | None
    plan: Plan | None
    fastpath: bool = False


class Push(Message):
    """One gradient; in frame 0, or in the worker's shared memory at `slot`. Answered by Variables.

    `finite` is False if it holds NaN or infinity: it will be refused. `settings` are those of the program, from the worker that leads and
    only to shard 0, where they differ from the run's as the worker knows them, at `revision`.
    """

    worker: int
    incarnation: int
    request: int
    local_step: int
    version: int
    slot: int
    absent: list[int]
    loss: float | None
    finite: bool = True
    settings: list[dict[str, Any]] = []
    revision: int = -1


class Pull(Message):
    """The worker asks for the current version, or for the moving averages at it. Answered by Variables.

    With `state` the optimizer's state at that version comes with it.
    """

    worker: int
    incarnation: int
    request: int
    averaged: bool = False
    state: bool = False


class Values(Message):
    """Values of these variables, in frame 0 with the rest of the shard's memory, which the worker is about to assign.

    `number` is its nth assignment. Answered by ValuesKept.
    """

    worker: int
    incarnation: int
    number: int
    variables: list[int]


class Assign(Message):
    """The worker has come to its nth assignment, at `version`; `has_values` if every shard keeps its values. Answered by Variables.

    It is answered when n assignments have been made; or before, with an outcome that asks this worker for its values.
    """

    worker: int
    incarnation: int
    request: int
    number: int
    version: int
    has_values: bool
    variables: list[int]


class Probe(Message):
    """The worker has had no answer to `request`. Answered by Held, Unknown or the answer again."""

    worker: int
    incarnation: int
    request: int


class Beat(Message):
    """A sign of life. Answered by Alive."""

    worker: int
    incarnation: int


class Leave(Message):
    """The worker goes for good; what it found at its end, or, if its program failed, `why`. Answered by Bye."""

    worker: int
    incarnation: int
    loss: float | None
    accuracy: float | None
    finished: bool
    why: str = ""


class Stay(Message):
    """A worker's program goes on after its session, and may begin another one; or, if `gone`, it has ended. Not answered."""

    worker: int
    gone: bool = False


class Save(Message):
    """The chief wants a checkpoint, its `number`th; sent again to ask how that goes. Answered by SaveState."""

    worker: int
    incarnation: int
    number: int
    folder: str
    keep: int


class Settle(Message):
    """The chief is about to choose the checkpoint that the run goes on from: none may appear after that. Answered by Settled."""


class Stop(Message):
    """The chief ends the run now: everybody is released and told so. Answered by Alive."""

    worker: int
    incarnation: int


class Position(Message):
    """Where a worker stood in its data, and its random state, when it first held `version`. Not answered.

    Its schedulers are asked after that: what they are at the next push follows, unless this is `final`.
    """

    worker: int
    incarnation: int
    version: int
    body: dict[str, Any]
    final: bool = True


class Buffers(Message):
    """A worker's buffers, in frame 0, as it first held `version`; or as they are, for `number`, or, if final, at its end.

    Not answered.
    """

    worker: int
    incarnation: int
    version: int
    number: int = -1
    final: bool = False


class TakeBuffers(Message):
    """A worker asks for the run's buffers, its `number`th time; as one that joins, for those to begin with.

    Answered by SharedBuffers.
    """

    worker: int
    incarnation: int
    number: int
    joining: bool


class TakeBatches(Message):
    """A worker asks for its share of the data: a batch for each of these local steps. Answered by LeasedBatches.

    `void` says that it holds nothing any more and has made so many local steps; -1 says neither. `idle` says that it has
    nothing to compute until it is given something. Sent again under the same request if no answer comes.
    """

    worker: int
    incarnation: int
    request: int
    share: ShareSpec
    steps: list[int]
    void: int = -1
    idle: bool = False


class UseBatches(Message):
    """A worker says for which local steps its batches are, otherwise than before: [batch, step]. Answered by BatchesUsed."""

    worker: int
    incarnation: int
    request: int
    name: str
    steps: list[tuple[int, int]]


class Scale(Message):
    """Anybody says how many workers are wanted, within the cluster's range. Answered by Scaled."""

    workers: int


class FateOf(Message):
    """A client asks shard 0 what became of a gradient whose worker it has lost. Answered by Fate."""

    worker: int
    incarnation: int
    local_step: int


class StatusRequest(Message):
    """Anybody asks how the run is doing. Answered by Status, under the same `request`."""

    request: int = -1


class MeanRequest(Message):
    """Anybody asks a shard for the mean gradient of a recent update. Answered by Mean at once.

    The shard keeps the next update's mean after that, for the next time it is asked.
    """

    request: int = -1


# -- ps to worker ---------------------------------------------------------------------------------------------------------


class Way(msgspec.Struct, array_like=True, frozen=True):
    """A transport by which a ps task can be reached, and where: a text that only this transport reads."""

    kind: str
    where: str


class Welcome(Message):
    """The ps task introduces itself; `created` says whether it holds variables, `ways` lists faster transports, best first.

    `generation` is the creation of these variables.
    """

    protocol: int
    task: str
    incarnation: int
    host: str
    pid: int
    created: bool
    package: str = ""
    ways: list[Way] = []
    generation: int = 0


class Created(Message):
    """The variables exist; `existing` says that they did before and were left alone."""

    version: int
    existing: bool


class Outcome(Message):
    """What became of a gradient: the version it met, and why it was accepted or refused."""

    accepted: bool
    reason: str
    met: int


class Variables(Message):
    """One whole version; in frame 0, or in the ps's shared memory at `slot`. Constants follow in frame 1 after a Join.

    Shard 0 adds `save`, a version that is being saved and for which it wants the worker's Position, and, after a Join, the
    `position` that the checkpoint holds for this worker. `lr` are the rates of the next update, `used` those of the last one;
    `settings` are the run's, with the number of their changes, where the worker does not know them. `fastpath` is the page on which
    workers make updates, `states` the memory of the optimizer's state, by the kernels' names in their order.
    """

    request: int
    version: int
    stop: bool
    slot: int
    ring: MemoryRef | None
    outcome: Outcome | None
    lr: list[float]
    save: int = -1
    position: dict[str, Any] | None = None
    generation: int = 0
    fastpath: MemoryRef | None = None
    states: list[MemoryRef] = []
    used: list[float] = []
    settings: list[dict[str, Any]] = []
    revision: int = -1
    optimizer: StateRef | None = None


class ValuesKept(Message):
    """The shard keeps the values for the worker's nth assignment."""

    number: int


class Held(Message):
    """The request is known and waits: for what, and for whom; meanwhile the position at version `save`, if it is not -1."""

    request: int
    what: str
    have: int
    need: int
    missing: list[int]
    save: int = -1


class Unknown(Message):
    """The request is not known here: send it again; and to the others too, if they answered in another generation."""

    request: int
    generation: int = 0


class Alive(Message):
    """The ps task is alive and at this version; `stop` says that the run is over.

    `lead` is the worker that does what is the chief's to do: the chief, or, while it counts as dead, the first one alive.
    `leave` asks the worker to finish its batch and go: fewer are wanted.
    """

    version: int
    stop: bool
    lead: int = 0
    leave: bool = False


class SaveState(Message):
    """How a checkpoint goes: `state` is running, done or failed; `path` where it is, `text` what went wrong."""

    number: int
    state: str
    step: int
    path: str
    text: str


class Settled(Message):
    """Whether no checkpoint is being made any more; asked again while one is being published."""

    done: bool


class SharedBuffers(Message):
    """The run's buffers, in frame 0: asked for by TakeBuffers; `whose` are the workers they come from."""

    number: int
    whose: list[int]


class Wanted(Message):
    """A ps asks for a worker's buffers as they are now. Answered by Buffers."""

    number: int


class LeasedBatches(Message):
    """The batches that a worker is given, by number, in order. None, and not over: all that are left others have.

    `void` says that this worker was taken for dead and holds nothing any more.
    """

    request: int
    numbers: list[int]
    over: bool
    void: bool


class BatchesUsed(Message):
    """It is noted for which local steps a worker's batches are; `ok` is False if one of them is not its own any more."""

    request: int
    ok: bool


class Scaled(Message):
    """So many workers are wanted from now on; these are alive, and those of them that are asked to leave."""

    workers: int
    live: list[int]
    leaving: list[int]


class Bye(Message):
    """The worker's leave is noted."""


class Status(Message):
    """The state of the run, as JSON-able data."""

    body: dict[str, Any]
    request: int = -1


class Mean(Message):
    """The mean gradient that made `version`, -1 for none yet; frame 0: an even sample of each piece, as float32."""

    version: int
    pieces: list[MeanPiece]
    request: int = -1


class Fate(Message):
    """What became of a gradient.

    `state` is accepted, refused, open (its worker may still push it) or never (its worker is gone and cannot any more).
    """

    worker: int
    incarnation: int
    local_step: int
    state: str
    reason: str = ""
    met: int = 0
    loss: float | None = None


class Fault(Message):
    """The request cannot be served; `kind` is for programs, `text` for people."""

    kind: str
    text: str
    request: int = -1


# -- ps to ps -------------------------------------------------------------------------------------------------------------


class ShardHello(Message):
    """A shard tells shard 0 that it is there, how far it has followed the log, and why it cannot, if so; repeated as a heartbeat."""

    shard: int
    incarnation: int
    followed: int
    pid: int
    host: str
    generation: int = 0
    protocol: int = 1  # of one that does not say
    package: str = ""
    broken: str = ""


class Have(Message):
    """A shard holds its part of this gradient."""

    shard: int
    worker: int
    incarnation: int
    request: int
    local_step: int
    followed: int
    generation: int = 0


class Apply(Message):
    """Log entry: the mean of these gradients (worker, incarnation, local step) makes `version`.

    `batches` are those of shared data that they were computed from, by share; a journal keeps them. `settings` are the options of the
    optimizer that change with this update, by parameter group.
    """

    keys: list[tuple[int, int, int]]
    version: int
    batches: dict[str, list[int]] = {}
    settings: list[dict[str, Any]] = []


class Drop(Message):
    """Log entry: these gradients will not be used."""

    keys: list[tuple[int, int, int]]


class Release(Message):
    """Log entry: answer this worker's request with the version (or its averages) reached at this place of the log.

    With `state` the optimizer's state goes with it.
    """

    worker: int
    incarnation: int
    request: int
    version: int
    stop: bool
    averaged: bool = False
    state: bool = False


class Assigned(Message):
    """Log entry: what this worker gave as values of these variables for its nth assignment makes `version`."""

    worker: int
    incarnation: int
    number: int
    version: int
    variables: list[int]


class Snapshot(Message):
    """Log entry: every shard writes itself, as it is at this place of the log, into the folder `partial`."""

    number: int
    version: int
    partial: str


class End(Message):
    """Log entry: the job is over."""

    ok: bool
    why: str


class Log(Message):
    """Entries of shard 0's log, the first of which is number `first`; every shard follows them in order."""

    generation: int
    first: int
    entries: list[Apply | Assigned | Drop | Release | Snapshot | End]


class Part(Message):
    """A shard has written its part of a checkpoint, or failed to; repeated until PartTaken."""

    shard: int
    number: int
    size_bytes: int
    sha256: str
    pieces: list[dict[str, Any]]
    scalars: dict[str, Any]
    error: str


class PartTaken(Message):
    """Shard 0 has heard of a part."""

    number: int


AnyMessage = (
    Hello
    | Create
    | Join
    | Push
    | Pull
    | Values
    | Assign
    | Probe
    | Beat
    | Leave
    | Stay
    | Save
    | Settle
    | Stop
    | Position
    | Buffers
    | TakeBuffers
    | TakeBatches
    | UseBatches
    | Scale
    | FateOf
    | StatusRequest
    | MeanRequest
    | Welcome
    | Created
    | Variables
    | ValuesKept
    | Held
    | Unknown
    | Alive
    | LeasedBatches
    | BatchesUsed
    | Scaled
    | Bye
    | SharedBuffers
    | Wanted
    | SaveState
    | Settled
    | Status
    | Mean
    | Fate
    | Fault
    | ShardHello
    | Have
    | Log
    | Part
    | PartTaken
)
