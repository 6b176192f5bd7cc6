"""What workers, and those who look at a run, say to ps tasks."""

from __future__ import annotations

from typing import Any

import msgspec

from torchquorum.wire.plan import JournalRef, MemoryRef, Plan, ShareSpec, StateRef, TrackMemory, TrackValues
from torchquorum.wire.protocol import Message


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
    buffers follow in a further frame, if the plan has any; with `optimizer` the state that the optimizer begins with is in the
    last one. Of several optimizers, each has its values and constants, and those in `states` a frame at the end. `generation` names this
    creation on all shards; `replace` says to give up variables that are there, because another ps has lost its own.
    `journal` says how far the updates after that checkpoint are to be made again from the journal; nothing if there are none.
    With `only_existing` nothing is created, and there are no frames: a ps that was restarted since it said that it has variables
    refuses. So the chief asks, too, whether what it has sent was created.
    """

    plan: Plan
    restore: str | None = None
    generation: int = 0
    replace: bool = False
    journal: JournalRef | None = None
    only_existing: bool = False
    optimizer: StateRef | None = None
    states: dict[int, StateRef] = {}


class Join(Message):
    """A worker is ready to compute. To shard 0 with the plan it expects, to the others without. Answered by Variables of every track.

    `gradients` is its memory for the first optimizer's gradients, and `fastpath` says whether it can make updates of that one by itself;
    `more` says both of the others. `rows` is its memory for rows of tables, of each optimizer, where this ps task is to use one.

    `life` is what a record needs to run this process again, to shard 0 where the run is recorded; `lost` the local step that was being
    pushed when the connection before this one was lost, 0 if none was, -1 if the session has not begun yet.
    """

    worker: int
    incarnation: int
    request: int
    gradients: MemoryRef | None
    plan: Plan | None
    fastpath: bool = False
    life: bytes = b""
    lost: int = -1
    more: list[TrackMemory] = []
    rows: list[MemoryRef | None] = []


class RowPart(msgspec.Struct, array_like=True):
    """Rows of a table, by its number with its optimizer, in the last frame: their keys in order, each once, and their gradients.

    In a frame the keys are `packed` into so many bytes; in shared memory they are as they are, and it is 0.
    """

    table: int
    count: int
    packed: int = 0


class Contribution(msgspec.Struct, array_like=True):
    """What a gradient is made of, where a worker says so.

    Attributes:
        weight: How much it counts in the mean of a round, such as a number of examples; 0 for as much as every other.
        inner_step: How many steps the worker's own optimizer has made; -1 where it has none.
        steps: How many of these came since the gradient before.
        pace_s: How many seconds the worker takes for one of them; 0 if it does not know.
    """

    weight: float = 0.0
    inner_step: int = -1
    steps: int = 0
    pace_s: float = 0.0


class Push(Message):
    """One gradient; in frame 0, or in the worker's shared memory at `slot`; rows of tables follow in one more. Answered by Variables.

    Or these lie in the worker's memory for rows, at `rows_at`.

    `finite` is False if it holds NaN or infinity: it will be refused. `settings` are those of the program, from the worker that leads and
    only to shard 0, where they differ from the run's as the worker knows them, at `revision`. `norm` is that of the whole gradient,
    `sample` a checksum of some of its elements, or 0. `track` is the optimizer whose it is, `of` what it is made of.
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
    norm: float | None = None
    rows: list[RowPart] = []
    track: int = 0
    sample: int = 0
    rows_at: int = -1
    of: Contribution | None = None


class PullRows(Message):
    """The worker asks for so many rows of a table (`count`), whose keys are in frame 0, packed. Answered by Rows.

    Or the keys lie in its memory for rows, at `at`; the rows then go there, too, behind them, at a multiple of 64 bytes.

    It goes to every ps task with the keys that are there; all answer at one place of the log. `track` is the optimizer whose table it
    is. With `ahead` they are for a later batch, and kept on the ps until the second one after; with `since`, the number of such a
    request, there are no keys: what has changed of its rows is asked for.
    """

    worker: int
    incarnation: int
    request: int
    table: int
    track: int = 0
    ahead: bool = False
    since: int = -1
    at: int = -1
    count: int = 0


class TakeEvicted(Message):
    """The worker asks which keys of a table went last. Answered by Evicted."""

    worker: int
    incarnation: int
    request: int
    table: int
    track: int = 0


class Pull(Message):
    """The worker asks for the current version, or for the moving averages at it. Answered by Variables of every track.

    With `state` the optimizer's state at that version comes with it.
    """

    worker: int
    incarnation: int
    request: int
    averaged: bool = False
    state: bool = False


class Values(Message):
    """Values of these variables, in frame 0 with the rest of the shard's memory, which the worker is about to assign.

    `number` is its nth assignment. With `optimizer` the shard's optimizer state is assigned, too; it is in the frame that follows, or in
    frame 0 where there are no variables. All of it is of one `track`. Answered by ValuesKept.
    """

    worker: int
    incarnation: int
    number: int
    variables: list[int]
    optimizer: StateRef | None = None
    track: int = 0


class Assign(Message):
    """The worker has come to its nth assignment, at `version`; `has_values` if every shard keeps its values. Answered by Variables.

    It is answered when n assignments have been made; or before, with an outcome that asks this worker for its values. With `state` the
    optimizer's state is among these, and `settings` are the options of its parameter groups. That is of the first track, `more` of the
    others.
    """

    worker: int
    incarnation: int
    request: int
    number: int
    version: int
    has_values: bool
    variables: list[int]
    state: bool = False
    settings: list[dict[str, Any]] = []
    more: list[TrackValues] = []


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
    """The chief wants a checkpoint, its `number`th; sent again to ask how that goes. Answered by SaveState.

    With `at_once`, of the place of the log where it is now: not if another is being made.
    """

    worker: int
    incarnation: int
    number: int
    folder: str
    keep: int
    at_once: bool = False


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


class AtBarrier(Message):
    """A worker has come to the end of an epoch, or to `session.barrier()`, and waits for the others; it asks again until it may go on.

    `barrier` counts these calls from 1; 0: it is at `stage` of `epoch`. With `wait` False it waits for nothing: it only says that it is in
    `epoch`, or, with -1, asks which epoch the run is in. `pace` is how many batches it has taken, and how many gradients it has given of
    them. Answered by BarrierStatus.
    """

    worker: int
    incarnation: int
    request: int
    epoch: int = -1
    stage: int = 0
    barrier: int = 0
    wait: bool = True
    pace: tuple[int, int] = (0, 0)


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
