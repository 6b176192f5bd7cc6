"""The ps task's second thread: writes checkpoints while training goes on.

The ps thread hands it finished snapshots and takes the results when they are there; they share nothing else. What always
holds: the ps thread never waits for a disk.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import TorchQuorumError
from torchquorum.formats.checkpoint import next_created_at
from torchquorum.formats.checkpoint_manifest import FileInfo, Manifest
from torchquorum.formats.checkpoint_write import (
    BUFFERS,
    abandon,
    prune,
    publish,
    write_file,
    write_part,
    write_tensors,
)
from torchquorum.formats.journal import clear
from torchquorum.formats.ledger_write import sync_ledger
from torchquorum.formats.row_file import write_rows
from torchquorum.formats.storage import Location
from torchquorum.server.snapshot import ShardSnapshot


@dataclass(slots=True)
class Written:
    """A shard's part is on disk, or not."""

    number: int
    snapshot: ShardSnapshot
    info: FileInfo | None
    error: str
    rows: FileInfo | None = None
    nonfinite: list[str] = field(default_factory=list)  # the variables and tables that hold NaN or infinity


@dataclass(slots=True)
class Published:
    """A checkpoint is complete, or not."""

    number: int
    path: Location | None
    error: str


class Jobs(Protocol):
    """Does jobs, one after another: `JobThread`, or what a ps task on a virtual clock is given instead."""

    def put(self, job: Callable[[], None], /) -> None:
        """Does a job after those before it, now or later."""
        ...

    def finish(self, timeout_s: float, /) -> None:
        """Waits until all jobs are done, and takes no more."""
        ...


class JobThread:
    """Does jobs on a thread of its own, started with the first."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], None]) -> None:
        """Does a job after those before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchquorum-saver", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def finish(self, timeout_s: float) -> None:
        """Waits until all jobs are done, and ends the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            self._thread = None


class Saver:
    """Writes checkpoints.

    Args:
        clock: Tells how old the files of dead writers are.
        jobs: Does the writing; by default on a thread, started with the first checkpoint.
    """

    def __init__(self, clock: Clock = SYSTEM, jobs: Jobs | None = None) -> None:
        self._clock, self._jobs = clock, jobs or JobThread()
        self._results: queue.SimpleQueue[Written | Published] = queue.SimpleQueue()
        self._pending = 0

    @property
    def busy(self) -> bool:
        """Whether a result is still to come."""
        return self._pending > 0

    def write(self, number: int, partial: Location, shard: int, num_shards: int, snapshot: ShardSnapshot) -> None:
        """Writes a shard's part; the result is a Written."""

        def job() -> Written:
            try:
                part, rows = write_part(partial, shard, num_shards, snapshot.tensors), None
                if snapshot.rows and snapshot.chain is not None:
                    rows = write_file(partial, snapshot.chain.name, lambda path: write_rows(path, snapshot.rows))
                nonfinite = snapshot.nonfinite() + [table.name for table in snapshot.rows if not table.finite]
                return Written(number, snapshot, part, "", rows, nonfinite)
            except (TorchQuorumError, OSError) as error:
                return Written(number, snapshot, None, str(error))

        self.submit(job)

    def publish(
        self, number: int, partial: Location, manifest: Manifest, keep: int, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        """Writes the buffers, if there are any, and makes the parts a checkpoint; the result is a Published."""

        def job() -> Published:
            try:
                if buffers:
                    manifest.files[BUFFERS] = write_tensors(partial, BUFFERS, buffers)
                if isinstance(partial, Path):
                    sync_ledger(partial.parent)
                manifest.created_at = next_created_at(partial.parent, manifest.created_at)
                path = publish(partial, manifest)
                prune(path.parent, keep, clock=self._clock)
                if isinstance(path, Path):  # a journal is on a file system
                    clear(path.parent, manifest.generation, manifest.place)
                return Published(number, path, "")
            except (TorchQuorumError, OSError) as error:
                return Published(number, None, str(error))

        self.submit(job)

    def abandon(self, partial: Location) -> None:
        """Removes what was written of a checkpoint that will not be."""
        self.submit(lambda: abandon(partial), answered=False)

    def results(self) -> list[Written | Published]:
        """Returns what has been finished since the last call. Called by the ps thread."""
        found = []
        while True:
            try:
                found.append(self._results.get_nowait())
                self._pending -= 1
            except queue.Empty:
                return found

    def drop_results(self) -> None:
        """The run is over: what is still being written for it is finished, and its results are dropped."""
        self._results, self._pending = queue.SimpleQueue(), 0

    def submit(self, job: Callable[[], Any], *, answered: bool = True) -> None:
        """Does a job after those before it; `answered` says that its result is for `results`."""
        results = self._results

        def work() -> None:
            result = job()
            if answered:
                results.put(result)

        self._pending += answered
        self._jobs.put(work)

    def close(self, timeout_s: float = 30.0) -> None:
        """Finishes what was begun."""
        self._jobs.finish(timeout_s)
