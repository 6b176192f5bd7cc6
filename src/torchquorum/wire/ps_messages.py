"""What ps tasks answer, and what they say to workers of their own accord."""

from __future__ import annotations

from typing import Any

import msgspec

from torchquorum.wire.plan import MeanPiece, MemoryRef, StateRef
from torchquorum.wire.protocol import Message


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
    """What became of a gradient: the version of its optimizer that it met, and why it was accepted or refused."""

    accepted: bool
    reason: str
    met: int


class Variables(Message):
    """One whole version; in frame 0, or in the ps's shared memory at `slot`. Constants follow in frame 1 after a Join.

    Shard 0 adds `save`, a version that is being saved and for which it wants the worker's Position, and, after a Join, the
    `position` that the checkpoint holds for this worker, and `kept`, how much of earlier generations is in this one. `lr` are the
    rates of the next update, `used` those of the last one; `settings` are the run's, with the number of their changes, where the
    worker does not know them. `fastpath` is the page on which workers make updates, `states` the memory of the optimizer's state, by
    the kernels' names in their order. All of it is of one `track`: where every
    track is asked for there is an answer for each. `pace_s` is how long the fastest worker takes for a local step, from shard 0.
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
    kept: list[tuple[int, int]] = []
    track: int = 0
    pace_s: float = 0.0


class Rows(Message):
    """Rows of a table, in frame 0, as they are at `version`; without a frame they are in the worker's memory, where it wanted them.

    With `changed`, frame 0 has the places of so many rows among those of the request that was asked about, then these rows. Version -1:
    that request is not known, or is not answered yet.
    """

    request: int
    version: int
    changed: int = -1


class Evicted(Message):
    """The keys of a table whose rows went last, in frame 0, the latest last."""

    request: int


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
    """How a checkpoint goes: `state` is running, done, failed, or busy with another; `path` where it is, `text` what went wrong."""

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


class BarrierStatus(Message):
    """Whether a worker may go on, and if not, for whom it waits; `progress` grows while others train.

    `epoch` is the run's, whose data is divided among `members`; `steps` is how many gradients this worker, over all its incarnations, has
    given in it, `pace` how many batches the workers' programs take for how many gradients, if that is known. With `stopped` the run is
    over.
    """

    request: int
    opened: bool
    epoch: int
    members: list[int]
    steps: int
    missing: list[int]
    progress: int
    stopped: bool
    pace: tuple[int, int] = (0, 0)


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
