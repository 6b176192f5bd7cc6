"""One creation of the variables on a ps task, as far as every shard has it: `Leading` on shard 0, `Following` on the others.

Made by `creation`, owned by the service, which hands it what workers and shards send. What always holds: everything here
belongs to one generation and ends with it; shard 0 follows its own log at once, the others when they are sent it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torchquorum.wire.messages as m
from torchquorum.formats.storage import locate
from torchquorum.server.folder_watch import FolderWatch
from torchquorum.server.reads import Reads
from torchquorum.server.reply import Incoming, Reply
from torchquorum.server.saver import Published, Written
from torchquorum.server.saving import part_of
from torchquorum.server.shard import Shard
from torchquorum.server.task_life import TaskLife
from torchquorum.server.worker_requests import WorkerRequests


class Run:
    """What every ps task has of one creation of the variables.

    Args:
        life: What the task has beyond this run.
        shard: The variables of this task.
        requests: Answers the workers.
        reads: Answers those who only read.
    """

    def __init__(self, life: TaskLife, shard: Shard, requests: WorkerRequests, reads: Reads) -> None:
        self.life, self.shard, self.plan, self.generation = life, shard, shard.plan, shard.generation
        self.requests, self.reads = requests, reads
        self._watch = FolderWatch(shard, life.announce)
        self.broken = ""  # why an update, or what was promised of it, could not be made; the run is over then

    @property
    def admits(self) -> bool:
        """Whether workers may join now."""
        return True

    @property
    def fastpath_is_open(self) -> bool:
        """Whether workers may be making updates by themselves now."""
        return False

    def leave(self, got: Incoming[m.Leave]) -> list[Reply]:
        """A worker leaves for good."""
        self.shard.forget(got.message.worker, got.message.incarnation)
        return [got.reply(m.Bye())]

    def before(self, message: m.AnyMessage) -> list[Reply]:
        """Does what has to be done before a message is handled."""
        return []

    def advance(self) -> list[Reply]:
        """Does what follows from what was handled."""
        return []

    def tick(self, now: float, wall: float) -> list[Reply]:
        """Time has passed."""
        raise NotImplementedError

    def break_off(self, why: str, now: float, wall: float) -> list[Reply]:
        """An update failed: whoever asks for something is told why, and the task ends when all have left."""
        self.shard.broken, self.broken = True, why
        self.life.say(why)
        return []

    def process_ended(self, worker: int, incarnation: int, now: float, wall: float) -> list[Reply]:
        """The process of a worker on this host is gone; shard 0 draws the consequences."""
        return []

    def stop(self, wall: float) -> list[Reply]:
        """Ends the run; only shard 0 can."""
        return []

    def _write_snapshots(self) -> None:
        """Hands the snapshots that the log has asked for to the saver."""
        for entry, snapshot in self.shard.snapshots:
            partial = locate(entry.partial)
            self.life.saver.write(entry.number, partial, self.shard.index, self.plan.num_shards, snapshot)
        self.shard.snapshots.clear()

    def _written(self) -> Iterator[m.Part | Published]:
        """Yields what the saver has finished: parts of this shard, and on shard 0 whole checkpoints."""
        for result in self.life.saver.results():
            if isinstance(result, Written):
                self.shard.snapshot_written()
            yield part_of(self.shard.index, result) if isinstance(result, Written) else result

    def commit(self) -> None:
        """Waits until the disk has the journal, where a run is to survive a loss of power."""
        if self.shard.journal is not None and self.shard.journal.uncommitted:
            self.shard.journal.commit()

    def discard(self) -> None:
        """Another ps has lost its variables: these go too, and all are restored together."""
        self.life.saver.drop_results()
        self.close()

    def give_up(self) -> None:
        """The task ends: what was begun on disk and cannot be completed is removed."""

    def close(self) -> None:
        """Releases memory and files."""
        self.shard.close()
