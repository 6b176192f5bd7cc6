"""What those who only read a run say to ps tasks, and what they are answered: no part of the run, and not counted as one."""

from __future__ import annotations

import msgspec

from torchquorum.wire.plan import MemoryRef, Plan
from torchquorum.wire.protocol import Message


class ReaderAges(msgspec.Struct, array_like=True):
    """How old what a reader had was, in seconds, over its last minutes: median, 99th percentile, and now."""

    p50: float
    p99: float
    now: float


class ReaderHello(Message):
    """The first message of a reader on a connection; `reader` is a random number of its own. Answered by ReaderWelcome."""

    protocol: int
    reader: int
    name: str
    host: str
    pid: int
    package: str = ""


class ReaderWelcome(Message):
    """What a reader has to know: the plan, once the variables exist, who else holds some, and where on this host the versions lie.

    `versions` are the slots of each optimizer, `pages` those of its fast path, where it has one; both only for the same host.
    """

    protocol: int
    task: str
    incarnation: int
    ps: list[str]
    plan: Plan | None = None
    generation: int = 0
    versions: list[MemoryRef] = []
    pages: list[MemoryRef | None] = []
    package: str = ""


class TableCursor(msgspec.Struct, array_like=True):
    """Of which table a reader wants rows: those that have changed since version `since`, from position `start` on."""

    track: int
    table: int
    since: int
    start: int = 0


class Read(Message):
    """A reader asks for what has changed since what it has of this shard: version `since` of each optimizer, -1 for nothing.

    `generation` is that of what it has. With `dense` false only tables are meant. `references` name what it holds where differences are
    compressed, `buffers` is the number of the buffers that it has, -2 if it wants none. Answered by a VersionRead for each optimizer.
    """

    reader: int
    request: int
    generation: int
    since: list[int]
    dense: bool = True
    averages: bool = False
    buffers: int = -2
    compress: str = ""
    references: list[int] = []
    tables: list[TableCursor] = []


class RowsPart(msgspec.Struct, array_like=True):
    """Rows in a VersionRead: so many keys that have gone, so many that have changed, and where to go on, -1 if these are all.

    With `whole` they are all there are: what the reader had of the table on this shard before has gone.
    """

    table: int
    gone: int
    changed: int
    next: int
    whole: bool = False


class VersionRead(Message):
    """What a reader lacks of one optimizer on this shard, at `version`, which was made `age_s` before.

    Frames: with `kind` `whole` the variables; with `some` those in `variables`, one after the other; with `difference` what is added to the
    reader's reference; with `same` and `rows` none. Then the constants with `constants`, the moving averages with `averages`, the buffers
    with `buffers` from 0 on, and the rows of tables, if there are any. `reference` names what the reader holds then. `over` says that the
    run makes no more versions.
    """

    request: int
    generation: int
    track: int
    version: int
    age_s: float
    kind: str
    variables: list[int] = []
    constants: bool = False
    averages: bool = False
    buffers: int = -1
    reference: int = -1
    rows: list[RowsPart] = []
    over: bool = False
    full: bool = False


class ReadRows(Message):
    """A reader asks for rows: of each table (optimizer, table, how many keys); frame: the keys of all, each once and in order."""

    reader: int
    request: int
    tables: list[tuple[int, int, int]]


class RowsRead(Message):
    """Rows as they are at these versions of the optimizers; frame: those of each table, in the order of the keys."""

    request: int
    generation: int
    versions: list[int]
    age_s: float


SHARED_MEMORY = "shared memory"  # how a reader of this host reads


class ReaderBeat(Message):
    """A reader says every second which versions it has, how old they were, how it reads, and how many bytes came. Not repeated."""

    reader: int
    name: str
    generation: int
    versions: list[int]
    ages: ReaderAges | None = None
    way: str = ""
    received_bytes: int = 0
    leaves: bool = False


class ReaderAlive(Message):
    """The ps task lives; which creation of the variables it holds, 0 for none, and whether the run makes no more versions."""

    generation: int
    over: bool
