"""What ps tasks say to each other: shard 0's log, and what the others tell it."""

from __future__ import annotations

from typing import Any

from torchquorum.wire.protocol import Message


class ShardHello(Message):
    """A shard tells shard 0 that it is there, how far it has followed the log, and why it cannot, if so; repeated as a heartbeat.

    With `over` it has heard that the job is over, and ends.
    """

    shard: int
    incarnation: int
    followed: int
    pid: int
    host: str
    generation: int = 0
    protocol: int = 1  # of one that does not say
    package: str = ""
    broken: str = ""
    over: bool = False


class Have(Message):
    """A shard holds its part of this gradient."""

    shard: int
    worker: int
    incarnation: int
    request: int
    local_step: int
    followed: int
    generation: int = 0


class HaveKeys(Message):
    """A shard knows which rows this worker asks it for."""

    shard: int
    worker: int
    incarnation: int
    request: int
    followed: int
    generation: int = 0


class HaveRead(Message):
    """A shard knows what this reader asks it for."""

    shard: int
    reader: int
    request: int
    followed: int
    generation: int = 0


class Apply(Message):
    """Log entry: the mean of these gradients (worker, incarnation, local step) makes a track's `version`.

    `batches` are those of shared data that they were computed from, by share; a journal keeps them. `settings` are the options of the
    optimizer that change with this update, by parameter group. With `evicted_at`, a time in seconds since the epoch, rows whose time is
    over go with this update, after it.
    """

    keys: list[tuple[int, int, int]]
    version: int
    batches: dict[str, list[int]] = {}
    settings: list[dict[str, Any]] = []
    evicted_at: float = 0.0
    track: int = 0


class Drop(Message):
    """Log entry: these gradients will not be used."""

    keys: list[tuple[int, int, int]]


class Release(Message):
    """Log entry: answer this worker's request with the version (or its averages) reached at this place of the log.

    With `state` the optimizer's state goes with it. The version is that of `track`, or, for `ALL`, of the first.
    """

    worker: int
    incarnation: int
    request: int
    version: int
    stop: bool
    averaged: bool = False
    state: bool = False
    track: int = 0


class Assigned(Message):
    """Log entry: what this worker gave as values of these variables for its nth assignment makes a track's `version`.

    With `state` it gave the optimizer's state, too; `settings` are the options that change with it, by parameter group.
    """

    worker: int
    incarnation: int
    number: int
    version: int
    variables: list[int]
    state: bool = False
    settings: list[dict[str, Any]] = []
    track: int = 0


class Snapshot(Message):
    """Log entry: every shard writes itself, as it is at this place of the log, into the folder `partial`. The version is the first's.

    Of tables it may write what has changed since the checkpoint `base`, which was written in `base_partial`.
    """

    number: int
    version: int
    partial: str
    base: str = ""
    base_partial: str = ""


class End(Message):
    """Log entry: the job is over."""

    ok: bool
    why: str


class Over(Message):
    """Shard 0 ends, and with it every ps task: the job is over, and no program goes on that could begin another."""


class RowsOut(Message):
    """Log entry: answer this worker's request for rows with those at this place of the log."""

    worker: int
    incarnation: int
    request: int


class ReadOut(Message):
    """Log entry: answer this reader's request with what there is at this place of the log."""

    reader: int
    request: int


class Log(Message):
    """Entries of shard 0's log, the first of which is number `first`; every shard follows them in order."""

    generation: int
    first: int
    entries: list[Apply | Assigned | Drop | Release | RowsOut | ReadOut | Snapshot | End]


class Part(Message):
    """A shard has written its part of a checkpoint, or failed to; repeated until PartTaken."""

    shard: int
    number: int
    size_bytes: int
    sha256: str
    pieces: list[dict[str, Any]]
    scalars: dict[str, Any]
    error: str
    tables: list[dict[str, Any]] = []
    rows_bytes: int = 0
    rows_sha256: str = ""
    rows_file: str = ""
    shared: list[tuple[str, int, str]] = []
    nonfinite: list[str] = []


class PartTaken(Message):
    """Shard 0 has heard of a part."""

    number: int
