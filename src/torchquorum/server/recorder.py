"""Records a run on shard 0, so that `torchquorum replay` can make it again: see `torchquorum.wire.recorded`.

Owned by `Leading`, which flushes it before any reply leaves. What always holds: what a worker has heard is in the file, also after a
kill; a record that cannot be written any more ends at its last whole frame, and the run goes on without it.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import torchquorum.wire.messages as m
import torchquorum.wire.recorded as r
from torchquorum.formats.record_file import RecordFile, RunRecordError
from torchquorum.formats.storage import locate
from torchquorum.rules.quorum import Accepted, Refused
from torchquorum.server.row_requests import KNOWN
from torchquorum.server.shard import Shard, value_frames
from torchquorum.version import __version__
from torchquorum.wire.codec import Frame
from torchquorum.wire.plan import Plan

Kept = list[tuple[int, int]]  # generations, and the last of their versions


class Recorder:
    """The record of one creation of the variables.

    Args:
        file: Where it goes.
        say: Prints a line for people.
    """

    def __init__(self, file: RecordFile, say: Callable[[str], None]) -> None:
        self._file, self._say = file, say
        self._items: list[r.AnyItem] = []
        self._lives: set[tuple[int, int]] = set()
        self._handed: dict[int, int] = {}
        self._asked: dict[int, tuple[str, int]] = {}
        self._rows: dict[int, dict[tuple[int, int], r.GaveRows]] = {}
        self._broken = False

    # -- the run ------------------------------------------------------------------------------------------------------

    def began(self, began: r.Began) -> None:
        """The variables were created."""
        self._items.append(began)

    def joined(self, join: m.Join) -> None:
        """A worker joins; of its first time in this creation it is written what its process is."""
        if join.life and (join.worker, join.incarnation) not in self._lives:
            self._lives.add((join.worker, join.incarnation))
            self._items.append(r.Life(join.worker, join.incarnation, join.life))

    def asks(self, worker: int, kind: str, number: int = 0) -> None:
        """A worker asks for something; what it is answered later is the answer to that."""
        self._asked[worker] = kind, number

    def asks_rows(self, asked: m.PullRows, keys: Frame) -> None:
        """A worker asks for rows; the log says when it is answered."""
        of = self._rows.setdefault(asked.worker, {})
        name, worker, changed = (asked.incarnation, asked.request), asked.worker, asked.since >= 0
        of[name] = r.GaveRows(
            worker, asked.incarnation, asked.track, asked.table, asked.ahead, changed, zlib.crc32(keys)
        )
        while len(of) > KNOWN:
            del of[next(iter(of))]

    def entry(self, entry: r.AnyItem | m.RowsOut, outcome: m.Outcome | None) -> None:
        """The log has a further entry; `outcome` is that of the gradient of a worker that is answered by it."""
        if isinstance(entry, m.RowsOut):
            rows = self._rows.get(entry.worker, {}).pop((entry.incarnation, entry.request), None)
            if rows is not None:
                self._items.append(rows)
        elif isinstance(entry, m.Release):
            kind, number = self._asked.get(entry.worker, ("", 0))
            self._items.append(r.Answer(entry, kind, number, outcome))
        else:
            self._items.append(entry)

    def decided(self, action: Accepted | Refused, loss: float | None) -> None:
        """A gradient was accepted or refused."""
        accepted, reason = isinstance(action, Accepted), action.reason.value
        self._items.append(r.Decided(*action.key, action.version, action.met, accepted, reason, loss))

    def gone(self, worker: int, incarnation: int, how: str, why: str) -> None:
        """A life went out of the run."""
        self._items.append(r.Gone(worker, incarnation, how, why))

    # -- what else workers are told -----------------------------------------------------------------------------------

    def placed(self, worker: int, incarnation: int, position: dict[str, Any]) -> None:
        """A worker is given the position that a checkpoint has of it."""
        self._items.append(r.Placed(worker, incarnation, msgspec.msgpack.encode(position)))

    def handed(self, take: m.TakeBatches, answer: m.LeasedBatches) -> None:
        """A worker is given batches; an answer that says nothing, or was given before, is left out."""
        if not (answer.numbers or answer.over or answer.void) or self._handed.get(take.worker) == take.request:
            return
        self._handed[take.worker] = take.request
        share, numbers = take.share.name, answer.numbers
        self._items.append(r.Handed(take.worker, take.incarnation, share, numbers, answer.over, answer.void))

    def opened(self, asked: m.AtBarrier, status: m.BarrierStatus) -> None:
        """A worker at the end of an epoch or at a barrier may go on, or is told in which epoch the run is."""
        if status.opened or status.stopped:
            what = asked.epoch, asked.stage, asked.barrier, asked.wait
            self._items.append(r.Opened(asked.worker, asked.incarnation, what, status))

    def gave_buffers(self, take: m.TakeBuffers, whose: Sequence[int], values: torch.Tensor) -> None:
        """A worker is given the run's buffers."""
        self._items.append(r.GaveBuffers(take.worker, take.incarnation, list(whose), values.numpy().tobytes()))

    # -- the file -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hands what there is to the operating system."""
        if not self._items:
            return
        items, self._items = self._items, []
        if self._broken:
            return
        try:
            self._file.append(r.encode_items(items))
        except RunRecordError as error:
            self._broken = True
            self._say(f"{error}: the run goes on, and can be replayed up to here")

    def close(self) -> None:
        """Writes the rest and closes the file."""
        self.flush()
        self._file.close()


def open_recorder(plan: Plan, say: Callable[[str], None]) -> Recorder | None:
    """Returns the recorder of a run, if its plan wants one."""
    folder = locate(plan.logdir) if plan.record and plan.logdir is not None else None
    return Recorder(RecordFile(folder), say) if isinstance(folder, Path) else None


def describe_beginning(shard: Shard, base: int, frames: Sequence[Frame], wall: float, kept: Kept) -> r.Began:
    """Returns what a record has of a creation; `base` is the generation that it goes on from, -1 for the chief's values in `frames`."""
    task = {
        "torchquorum": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    checksum = checksum_of(shard.plan, frames) if base < 0 else 0
    return r.Began(
        shard.generation, shard.plan, shard.version, base, checksum, task, wall, updates=shard.place, kept=kept
    )


def checksum_of(plan: Plan, frames: Sequence[Frame]) -> int:
    """Returns the checksum of the values that a chief sends, of all optimizers."""
    checksum = 0
    for frame in frames[: value_frames(plan)]:
        checksum = zlib.crc32(frame, checksum)
    return checksum
