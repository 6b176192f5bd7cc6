"""What tasks say to each other: all messages, and their parts, by one name. docs/protocol.md is the same table in prose.

Shared by server and worker, which share nothing else. Structs are arrays on the wire, with the class name as tag; tensors
never stand in them but follow as raw frames or lie in shared memory.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false
from __future__ import annotations

from torchquorum.wire.plan import (
    AfterSpec,
    AverageSpec,
    BufferSpec,
    InitSpec,
    JournalRef,
    MeanPiece,
    MemoryRef,
    OptimizerSpec,
    Plan,
    ScheduleSpec,
    ShareSpec,
    StatePiece,
    StateRef,
    TableSpec,
    TrackMemory,
    TrackSpec,
    TrackValues,
)
from torchquorum.wire.protocol import (
    ALL,
    CREATION,
    PACKAGE,
    PROTOCOL,
    STANDS_IN,
    Message,
    refuse_protocol,
)
from torchquorum.wire.ps_messages import (
    Alive,
    BarrierStatus,
    BatchesUsed,
    Bye,
    Created,
    Evicted,
    Fate,
    Fault,
    Held,
    LeasedBatches,
    Mean,
    Outcome,
    Rows,
    SaveState,
    Scaled,
    Settled,
    SharedBuffers,
    Status,
    Unknown,
    ValuesKept,
    Variables,
    Wanted,
    Way,
    Welcome,
)
from torchquorum.wire.reader_messages import (
    Read,
    ReaderAges,
    ReaderAlive,
    ReaderBeat,
    ReaderHello,
    ReaderWelcome,
    ReadRows,
    RowsPart,
    RowsRead,
    TableCursor,
    VersionRead,
)
from torchquorum.wire.shard_messages import (
    Apply,
    Assigned,
    Drop,
    End,
    Have,
    HaveKeys,
    HaveRead,
    Log,
    Over,
    Part,
    PartTaken,
    ReadOut,
    Release,
    RowsOut,
    ShardHello,
    Snapshot,
)
from torchquorum.wire.worker_messages import (
    Assign,
    AtBarrier,
    Beat,
    Buffers,
    Contribution,
    Create,
    FateOf,
    Hello,
    Join,
    Leave,
    MeanRequest,
    Position,
    Probe,
    Pull,
    PullRows,
    Push,
    RowPart,
    Save,
    Scale,
    Settle,
    StatusRequest,
    Stay,
    Stop,
    TakeBatches,
    TakeBuffers,
    TakeEvicted,
    UseBatches,
    Values,
)

AnyMessage = (
    Hello
    | Create
    | Join
    | Push
    | PullRows
    | TakeEvicted
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
    | AtBarrier
    | Scale
    | FateOf
    | StatusRequest
    | MeanRequest
    | ReaderHello
    | Read
    | ReadRows
    | ReaderBeat
    | ReaderWelcome
    | VersionRead
    | RowsRead
    | ReaderAlive
    | Welcome
    | Created
    | Variables
    | Rows
    | Evicted
    | ValuesKept
    | Held
    | Unknown
    | Alive
    | LeasedBatches
    | BatchesUsed
    | BarrierStatus
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
    | HaveKeys
    | HaveRead
    | Log
    | Over
    | Part
    | PartTaken
)
