"""How shard 0 makes a checkpoint of all shards: a snapshot in the log, a part from each, the workers' positions, a manifest.

Owned by `Leading`. One checkpoint is made at a time. What always holds: it is published only when every shard has written its
part of the same version; what fails is reported and removed, and checkpoints saved before stay; the last one of a run is tried
again for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchquorum.formats.checkpoint_manifest import CheckpointError
from torchquorum.formats.checkpoint_write import begin
from torchquorum.formats.journal import JournalError
from torchquorum.formats.storage import locate
from torchquorum.lines import first_of
from torchquorum.server.buffer_home import BufferHome
from torchquorum.server.leader import Leader
from torchquorum.server.save_failures import RETRY_S, Retry, SaveFailures
from torchquorum.server.saver import Published, Saver
from torchquorum.server.saving import NewestCheckpoint, Saving
from torchquorum.server.stand_in import StandIn
from torchquorum.server.worker_positions import WorkerPositions
from torchquorum.wire.messages import Part, SaveState

POSITIONS_S = 5.0
UNASKED = -1000
FIRST = -2


class Checkpoints:
    """The checkpoint that is being made, and how the last one went.

    Attributes:
        positions: Where the workers stood.
        stand_in: When shard 0 saves in the chief's place.
        saving: The one that is being made.
        last: How the last one went.
        newest: The newest that is complete, or where the run began.
        lost: Why the last version of the run is not saved, once no more is tried; empty before, and if it is saved.
        first_is_due: Whether workers wait for the first one, from which a journal goes on.

    Args:
        leader: Decides; a checkpoint begins with an entry in its log.
        saver: Writes.
        say: Prints a line for people.
        buffers: The model's buffers, if it has any.
        positions: Each worker's position in the checkpoint that the run goes on from.
        generation: Which creation of the variables this is.
    """

    def __init__(
        self,
        leader: Leader,
        saver: Saver,
        say: Callable[[str], None],
        *,
        buffers: BufferHome | None = None,
        positions: dict[str, dict[str, Any]] | None = None,
        generation: int = 0,
    ) -> None:
        self._leader, self._plan, self._saver, self._say = leader, leader.plan, saver, say
        self._buffers, self._generation = buffers, generation
        self.positions = WorkerPositions(leader.quorum, buffers, positions or {})
        self.stand_in = StandIn(leader.quorum)
        self._failures = SaveFailures(say, self._plan.save_s)
        self.saving: Saving | None = None
        self.last = SaveState(-1, "none", -1, "", "")
        self.newest = NewestCheckpoint(leader.quorum.version, leader.quorum.place)
        self._exact = any(rule.once_per_round for rule in self._plan.rules)
        self.lost = ""
        self._closed = False
        self._next: tuple[int, str, int] | None = None
        self.first_is_due = False

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being made, or waits for its turn."""
        return self.saving is not None or self._next is not None or self._failures.retry is not None

    def save(self, number: int, folder: str, keep: int, now: float, *, at_once: bool = False) -> SaveState:
        """Starts checkpoint `number`, unless it is known; while another is being made it waits for its turn.

        One waits at a time, the latest asked for; it will be of the version that there is then. One that is wanted `at_once` does not wait.
        """
        state = self.state(number)
        if state is None and self._leader.quorum.stopped and self.newest.path and not self.unsaved:
            return SaveState(number, "done", self.newest.version, self.newest.path, "")  # by ps task 0, in its place
        if state is None and self.busy and at_once:
            return SaveState(number, "busy", -1, "", "")
        if state is None and self.busy:
            self._next = (number, folder, keep)
        elif state is None:
            self._begin(number, folder, keep, now)
        return state or self.state(number) or SaveState(number, "running", -1, "", "")

    def _begin(self, number: int, folder: str, keep: int, now: float) -> None:
        version = self._leader.quorum.version
        try:
            partial = begin(locate(folder), version)
        except CheckpointError as error:
            self._failed(number, folder, keep, str(error), now)
            return
        self.positions.begin()
        self.saving = Saving(
            number,
            version,
            folder,
            partial,
            keep,
            now,
            {**self._leader.data.state(), **self._leader.barrier_waits.state()},
            [settings.now for settings in self._leader.settings],
            place=self._leader.quorum.place,
            position=self._leader.position,
            versions=[track.version for track in self._leader.quorum.tracks],
        )
        self._leader.snapshot(number, str(partial), *self.newest.base)

    def state(self, number: int) -> SaveState | None:
        """Returns how checkpoint `number` goes, if it is known."""
        if self.saving is not None and self.saving.number == number:
            return SaveState(number, "running", self.saving.version, "", "")
        if self._failures.retry is not None and self._failures.retry.number == number:
            return SaveState(number, "running", self._leader.quorum.version, "", self._failures.retry.why)
        return self.last if self.last.number == number else None

    def stand_in_for_chief(self, now: float) -> None:
        """While the chief is away it asks for no checkpoints, so shard 0 makes them itself: at once, then by the clock."""
        if self._leader.quorum.stopped and self.stand_in.chief_has_left:
            self.save_unasked(now)  # the others wait for the last checkpoint
        elif not self.stand_in.chief_is_away:
            self.stand_in.chief_is_there()
        elif self.stand_in.is_due(now):
            self.stand_in.saved(now)
            self.save_unasked(now)

    def restored_from(self, step: int, first: int) -> None:
        """The checkpoint that the run goes on from is of this step; the journal led on from there, its first update to this place."""
        self.newest.version, self.newest.place = step, first - 1

    def save_again(self, now: float, *, due: bool) -> None:
        """With `due`, what was saved was removed: saves the current version. A durable run goes on only if that succeeds."""
        if due and not self.busy and self._plan.logdir is not None:
            self.first_is_due = bool(self._plan.durable)
            self.last, self.newest = SaveState(-1, "none", -1, "", ""), NewestCheckpoint(-1, -1)
            self.save(UNASKED - self._leader.quorum.place, self._plan.logdir, self._plan.keep, now)

    def save_unasked(self, now: float) -> None:
        """Saves the current version if it is not saved and the run has a folder; `busy` says while that goes on."""
        if not self.busy and not self.lost and not self._closed and self.unsaved:
            self.save(UNASKED - self._leader.quorum.place, str(self._plan.logdir), self._plan.keep, now)

    @property
    def unsaved(self) -> bool:
        """Whether the run has a folder, and no checkpoint of its current version."""
        return self._plan.logdir is not None and self._leader.quorum.place != self.newest.place

    def wants_position(self, worker: int) -> int:
        """Returns the version for which a worker's position is wanted, or -1."""
        saving = self.saving
        return (
            saving.position
            if saving is not None and not saving.publishing and self.positions.is_missing(worker, saving.position)
            else -1
        )

    def part(self, part: Part) -> None:
        """Takes a shard's part."""
        if self.saving is not None and self.saving.number == part.number:
            self.saving.parts[part.shard] = part

    def advance(self, now: float, wall: float) -> None:
        """Publishes when everything is there, or gives up when a part has failed."""
        if (retry := self._failures.take(now)) is not None:
            self._begin(retry.number, retry.folder, retry.keep, now)
        if not (self.saving or self._failures.retry) and self._next is not None:
            waiting, self._next = self._next, None
            self.save(*waiting, now)
        saving = self.saving
        if saving is None or saving.publishing:
            return
        failed = [p for p in saving.parts.values() if p.error]
        if failed:
            self._fail(saving, failed[0].error, now)
            return
        if len(saving.parts) < self._plan.num_shards:
            return
        if (
            self.positions.somebody_is_missing(saving.position)
            and saving.waits_for_positions
            and now - saving.begun_at < POSITIONS_S
        ):
            return
        saving.publishing = True
        self._leader.history.check()  # a checkpoint never holds updates that the ledger does not know after a crash
        workers = self.positions.at(saving.position, self._plan.num_workers)
        manifest, buffers = saving.manifest(self._plan, self._generation, workers, wall), {}
        if self._buffers is not None:
            alive = self._leader.quorum.alive
            manifest.buffers, buffers = self._buffers.save(saving.position, alive, exact=self._exact)
        self._saver.publish(saving.number, saving.partial, manifest, saving.keep, buffers)

    def save_first(self, now: float) -> None:
        """A journal goes on from a checkpoint: saves the variables as they were created; workers may join after that."""
        assert self._plan.logdir is not None
        self.first_is_due = True
        self.save(FIRST, self._plan.logdir, self._plan.keep, now)

    def discard(self) -> None:
        """The variables are discarded: what was written of an unpublished checkpoint is removed."""
        if self.saving is not None and not self.saving.publishing:
            self._saver.abandon(self.saving.partial)
        self.saving = self._failures.retry = None

    def settle(self) -> bool:
        """A shard has lost its variables, and all go on from a checkpoint: what is in the making is one soon, or never.

        Returns:
            Whether nothing is in the making: no checkpoint appears after that, unless it is asked for.
        """
        saving, self._next, self._failures.retry = self.saving, None, None
        exact = self._exact
        if saving is not None and (
            len(saving.parts) < self._plan.num_shards or (exact and self.positions.somebody_is_missing(saving.position))
        ):
            self.fail("a ps task was lost before its part, or the place of every worker in its data, was here", None)
        elif saving is not None:
            saving.waits_for_positions = False  # without rounds an older place will do
        return self.saving is None

    def fail(self, why: str, now: float | None) -> None:
        """Gives the checkpoint in the making up; at the end of the run it is tried again, unless there is no `now`."""
        if self.saving is not None and not self.saving.publishing:
            self._fail(self.saving, why, now)

    def published(self, result: Published, now: float) -> None:
        """A checkpoint is complete, or failed."""
        saving = self.saving
        if saving is None or saving.number != result.number:
            return  # of before a restore
        if result.path is None:
            self._fail(saving, result.error, now)
            return
        self.saving, self.first_is_due, self.lost = None, False, ""
        self.newest = NewestCheckpoint(saving.version, saving.place, str(result.path), str(saving.partial))
        self._failures.succeeded()
        self.last = SaveState(saving.number, "done", saving.version, self.newest.path, "")
        self._leader.history.note("saved", text=result.path.name, values={"step": saving.version})
        self._say(f"saved {result.path}")
        if saving.nonfinite:
            self._say(
                f"{result.path.name} holds NaN or infinity in {first_of(saving.nonfinite)}. The newest checkpoint before it whose values "
                "are all finite is kept"
            )
            self._leader.effects.note(self._leader.history.largest())

    def _fail(self, saving: Saving, error: str, now: float | None) -> None:
        self._saver.abandon(saving.partial)
        self.saving = None
        self._failed(saving.number, saving.folder, saving.keep, error, now)

    def _failed(self, number: int, folder: str, keep: int, error: str, now: float | None) -> None:
        """A checkpoint could not be made: training goes on, or, at the run's end, it is tried again for a while."""
        self._check_first(error)
        quorum, why = self._leader.quorum, error.rstrip(".")
        last = quorum.stopped or not quorum.alive
        again = self._failures.is_tried_again(now, last=last)
        self._failures.complain(f"no checkpoint at step {quorum.version}: {why}", now, last=last, again=again)
        if again and now is not None:
            self._failures.retry = Retry(number, folder, keep, why, now + RETRY_S)
            return
        if last:
            self.lost = f"the last step of the run, {quorum.version}, is not saved: {why}.{self.name_last_good()}"
            error = f"{why}.{self.name_last_good()}"
        self.last = SaveState(number, "failed", quorum.version, "", error)

    def close(self) -> None:
        """The variables may be half made: one in the making is finished, and no other is begun."""
        self._closed, self._next, self._failures.retry = True, None, None

    def hurry(self) -> None:
        """Somebody wants the end now: a last checkpoint that fails is not tried again."""
        if (retry := self._failures.take()) is not None:
            self._failed(retry.number, retry.folder, retry.keep, retry.why, None)

    def name_last_good(self) -> str:
        """Returns a sentence about the checkpoint that a new start would go on from; nothing where the run has no folder."""
        if self._plan.logdir is None:
            return ""
        more = f"; that of step {self.saving.version} is still being written" if self.saving is not None else ""
        return f" The last good checkpoint is {self.newest.path or 'none'}{more}."

    def _check_first(self, error: str) -> None:
        """Without a first checkpoint a journal is worth nothing, and the run would not be what was asked for."""
        if self.first_is_due:
            raise JournalError(f"the run cannot be durable: its first checkpoint failed: {error}")
