"""The messages between a client and compute tasks; docs/protocol.md is the same table in prose.

A graph travels as a list of nodes, each an operation's name and its arguments, in the types of JSON; tensors follow as raw
frames. Nothing here can hold code or a pickle. Used by `torchquorum.graph`: `export` makes graphs, `runner` checks and runs
them, `dispatcher` and `inbox` exchange the messages. What always holds: `split` accepts any bytes and raises only WireError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from torchquorum.wire import codec
from torchquorum.wire.codec import Frame, WireError
from torchquorum.wire.messages import Fault, Message, Plan
from torchquorum.worker.step import Step

MAX_FRAME_BYTES = 4 << 30


class TensorSpec(msgspec.Struct, array_like=True):
    """A tensor that follows as a raw frame."""

    dtype: str
    shape: list[int]


class InputSpec(msgspec.Struct, array_like=True):
    """A value that a graph begins with.

    `kind` is parameter, buffer, constant or input; `trained` is for parameters, `persistent` for buffers. A dimension of an
    input may be a name: any size, the same for every dimension of that name; the empty name stands for any size.
    """

    kind: str
    name: str
    dtype: str
    shape: list[int | str]
    trained: bool = False
    persistent: bool = True


class NodeSpec(msgspec.Struct, array_like=True):
    """One operation. In its arguments {"ref": i} is value i: the inputs first, then the nodes, in order."""

    name: str
    op: str
    args: list[Any]
    kwargs: dict[str, Any]


class GraphSpec(msgspec.Struct):
    """A graph; one frame per buffer and constant follows it, in the order of the inputs."""

    name: str
    inputs: list[InputSpec]
    nodes: list[NodeSpec]
    outputs: list[Any]


class RunOptions(msgspec.Struct, kw_only=True):
    """What a compute task needs to know of a run beyond its plan."""

    save_every_s: float | None = None
    save_every_steps: int | None = None
    keep: int = 5
    start_s: float = 1800.0
    round_s: float = 1800.0
    log_device_placement: bool = False


# -- client to compute task -----------------------------------------------------------------------------------------------


class Attach(Message):
    """The first message of a client. Answered by Attached."""

    protocol: int
    client: str
    package: str = ""


class Execute(Message):
    """Run this graph once on the inputs whose frames follow those of the graph. Answered by Outputs."""

    number: int
    graph: GraphSpec
    inputs: list[TensorSpec]


class Train(Message):
    """Load this graph and join the run as a worker. Answered by State, now and whenever it is asked for."""

    run: str
    client: str
    graph: GraphSpec
    plan: Plan
    options: RunOptions


class Batch(Message):
    """Compute the gradient of this batch and push it. Answered by Done or Failed."""

    run: str
    number: int
    seed: int
    inputs: list[TensorSpec]


class Ask(Message):
    """How is the task, and what became of the awaited batches? Answered by State, and Done or Failed again.

    `stamp` is that of the last State: it tells the task how old the client's knowledge of it is.
    """

    run: str
    awaiting: list[int]
    stamp: float


class Recall(Message):
    """Give this batch back if it is not begun. Answered by Recalled, or not at all."""

    run: str
    number: int


class Fetch(Message):
    """Send me the variables, averages or buffers. Answered by Fetched."""

    run: str
    number: int
    what: str


class SaveNow(Message):
    """Make a checkpoint. Answered by Saved."""

    run: str
    number: int


class Finish(Message):
    """The client has no more batches; with `stop` the task ends the run for all workers. Answered by Finished."""

    run: str
    ok: bool
    stop: bool


# -- compute task to client -----------------------------------------------------------------------------------------------


class Attached(Message):
    """The compute task introduces itself; `life` is its incarnation as a process, `cluster` the tasks it knows of."""

    protocol: int
    task: str
    life: str
    host: str
    pid: int
    device: str
    cluster: dict[str, list[str]]
    doing: str
    package: str = ""


class Outputs(Message):
    """The outputs of a graph, tensors in the frames, and where its operations ran; or what went wrong."""

    number: int
    outputs: list[TensorSpec]
    placement: list[str]
    error: str


class State(Message):
    """How the task is doing.

    `state` is free, loading, joining, ready, finishing, finished or failed, with `text` for people. `waiting_for` is what the
    batch `doing` waits for at the ps tasks, if it waits. `unknown` lists awaited batches that never arrived, or were dropped.
    `stamp` is the task's own clock, for the next Ask. A peer that asks about another run than the task's gets only `state`:
    `run` is then empty and `incarnation` 0, because with these it could impersonate the client or the worker.
    """

    run: str
    life: str
    state: str = "free"
    text: str = ""
    incarnation: int = 0
    version: int = 0
    local_step: int = 0
    doing: int = -1
    waiting_for: str = ""
    loss: float | None = None
    unknown: list[int] = msgspec.field(default_factory=list)
    stop: bool = False
    stamp: float = 0.0


class Done(Message):
    """What became of a batch, and of the step that its gradient made."""

    run: str
    life: str
    number: int
    loss: float | None
    step: Step
    seconds: float


class Failed(Message):
    """The batch could not be computed."""

    run: str
    life: str
    number: int
    text: str


class Recalled(Message):
    """The batch was not begun, and will not be."""

    run: str
    life: str
    number: int


class Fetched(Message):
    """The tensors that were asked for, by name, with the version they are of; frames in this order."""

    run: str
    number: int
    version: int
    names: list[str]
    tensors: list[TensorSpec]
    error: str


class Saved(Message):
    """The checkpoint's path, or in `error` why there is none."""

    run: str
    number: int
    path: str
    error: str


class Finished(Message):
    """The task has left the run."""

    run: str
    life: str


AnyGraphMessage = (
    Attach
    | Execute
    | Train
    | Batch
    | Ask
    | Recall
    | Fetch
    | SaveNow
    | Finish
    | Attached
    | Outputs
    | State
    | Done
    | Failed
    | Recalled
    | Fetched
    | Saved
    | Finished
    | Fault
)

_decoder = msgspec.msgpack.Decoder(AnyGraphMessage)


def split(frames: Sequence[Frame]) -> tuple[AnyGraphMessage, list[Frame]]:
    """Returns the message and the tensor frames of what was received.

    Raises:
        WireError: It is too large, is not msgpack, or is no message between a client and a compute task.
    """
    if not frames:
        raise WireError("an empty message")
    return codec.decode_as(_decoder, frames[0]), list(frames[1:])
