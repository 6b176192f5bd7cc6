"""The variables of one ps task: it holds gradients as they arrive and follows the log that shard 0 writes.

Owned by the run. No sockets and no clock in here; replies come back as data. What always holds: entries of the log are
followed in order, each once; a request is answered with the version reached at its place in the log, all of it. What belongs to
one optimizer is in its track (`torchquorum.server.shard_track`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from torchquorum.errors import UpdateError
from torchquorum.fastpath.page import FastPage
from torchquorum.formats.checkpoint import CheckpointReader, load_manifest
from torchquorum.formats.checkpoint_manifest import Manifest
from torchquorum.formats.journal import JournalError, Record
from torchquorum.formats.journal_write import JournalWriter, Payload
from torchquorum.formats.storage import Location
from torchquorum.formats.stored_tensors import StoredTensors
from torchquorum.lines import text_of
from torchquorum.placement.layout import Region
from torchquorum.rules.quorum import Key
from torchquorum.server.decision_log import LogEntry
from torchquorum.server.pending_gradients import PendingGradients
from torchquorum.server.reply import Reply
from torchquorum.server.row_chains import RowChains
from torchquorum.server.row_requests import RowRequests
from torchquorum.server.shard_track import ShardTrack
from torchquorum.server.shard_variables import ShardVariables
from torchquorum.server.snapshot import SavedTrack, ShardSnapshot, check_same_model, frames_of
from torchquorum.server.worker_table import TrackWorkers, WorkerTable
from torchquorum.wire.channel import Peer
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import (
    ALL,
    Apply,
    Assigned,
    Create,
    Drop,
    End,
    Join,
    Outcome,
    Plan,
    ReadOut,
    Release,
    RowsOut,
    Snapshot,
    StateRef,
)


class Shard:
    """The variables, the workers and the undecided gradients of one ps task.

    Args:
        index: Which ps task.
        plan: The run's plan.
        frames: Of each optimizer, the first values of its trained variables and of the others.
        versions: Of each optimizer, the version that these are; 0 by default.
        generation: Which creation of the variables this is.

    Attributes:
        tracks: What there is for each optimizer.
        workers: The workers that have joined here.
        row_requests: Who has asked for rows of tables.
        read_out: Answers those who only read.
        row_chains: The files of rows of its checkpoints.
        followed: How many entries of the log were followed.
        snapshots: Those that the log has asked for and the saver has not been given.
        ended: The end of the job, once the log has it.
        broken: An update has failed, here or on another shard: of the log only its end is followed.
    """

    def __init__(
        self,
        index: int,
        plan: Plan,
        frames: Sequence[Frame],
        *,
        versions: Sequence[int] = (),
        generation: int = 0,
    ) -> None:
        self.index, self.plan, self.generation = index, plan, generation
        plans = plan.tracks()
        self.workers = WorkerTable(plan.num_workers, [of.layout().trained[index] for of in plans])
        self.tracks: list[ShardTrack] = []
        with ExitStack() as made:
            for k, of in enumerate(plans):
                track = ShardTrack(
                    k,
                    index,
                    of,
                    frames[2 * k],
                    frames[2 * k + 1],
                    TrackWorkers(self.workers, k),
                    version=versions[k] if versions else 0,
                    generation=generation,
                )
                made.callback(track.close)
                self.tracks.append(track)
            made.pop_all()  # all are there
        self.row_requests = RowRequests()
        self.read_out: Callable[[ReadOut], list[Reply]] = lambda _entry: []
        self.row_chains = RowChains(index, plan.num_shards, plan.full_every)
        self.followed = 0
        self.snapshots: list[tuple[Snapshot, ShardSnapshot]] = []
        self.ended: End | None = None
        self.broken = False
        self.journal: JournalWriter | None = None

    @classmethod
    def created(cls, index: int, create: Create, frames: Sequence[Frame]) -> Shard:
        """Makes a shard from what the chief's variables, and its optimizers, begin with."""
        shard, states = cls(index, create.plan, frames, generation=create.generation), states_of(create)
        rows = iter(frames[2 * len(shard.tracks) :])
        try:
            for track in shard.tracks:
                track.tables.begin_with([next(rows)] if has_rows(track.plan) else [])
            for (track, ref), frame in zip(states.items(), frames[len(frames) - len(states) :], strict=True):
                of = shard.tracks[track]
                of.variables.load(of.read_state(ref, frame))
        except BaseException:
            shard.close()
            raise
        return shard

    @classmethod
    def restored(cls, index: int, plan: Plan, path: Location, generation: int = 0) -> tuple[Shard, Manifest]:
        """Makes a shard from a checkpoint, whatever the number of ps tasks it was saved with."""
        manifest = load_manifest(path)
        with CheckpointReader(path, manifest) as reader:
            check_same_model(manifest, reader, plan)
            return cls.made_of(index, plan, reader, manifest, generation), manifest

    @classmethod
    def made_of(cls, index: int, plan: Plan, reader: StoredTensors, manifest: Manifest, generation: int = 0) -> Shard:
        """Makes a shard of a saved state of the whole run."""
        saved = [SavedTrack.of(manifest, k) for k in range(len(plan.rules))]
        frames = [frame for of in plan.tracks() for frame in frames_of(reader, of, index)]
        shard = cls(index, plan, frames, versions=[s.version for s in saved], generation=generation)
        try:
            for track, at in zip(shard.tracks, saved, strict=True):
                track.variables.restore(reader, at)
                track.tables.restore(reader, manifest)
        except BaseException:
            shard.close()
            raise
        return shard

    # -- the first optimizer ------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Returns how many updates of the first optimizer this shard has applied."""
        return self.tracks[0].version

    @property
    def region(self) -> Region:
        """Returns where its trained variables stand."""
        return self.tracks[0].region

    @property
    def variables(self) -> ShardVariables:
        """Returns the variables of the first optimizer."""
        return self.tracks[0].variables

    @property
    def gradients(self) -> PendingGradients:
        """Returns the undecided gradients for these."""
        return self.tracks[0].gradients

    @property
    def page(self) -> FastPage | None:
        """Returns the page of the fast path for these, if there is one."""
        return self.tracks[0].page

    # -- all of them --------------------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """Returns how many updates this shard has applied, of all optimizers: where it is in the log."""
        return sum(track.version for track in self.tracks)

    @property
    def uncommitted(self) -> bool:
        """Whether the journal has updates that the disk may not have yet."""
        return self.journal is not None and self.journal.uncommitted

    # -- workers ------------------------------------------------------------------------------------------------------

    def admit(self, peer: Peer, join: Join) -> None:
        """Notes a worker that joins and opens its gradient memory."""
        forgotten = self.workers.admit(peer, join)
        for track in self.tracks:
            track.gradients.forget(forgotten)
            if track.page is not None:
                track.page.workers.release_slots(join.worker)

    def forget(self, worker: int, incarnation: int) -> None:
        """Ends the leases of a worker that is gone; it may come back."""
        if self.workers.knows(worker, incarnation):
            for track in self.tracks:
                track.variables.versions.forget(worker)

    def answer(self, worker: int, incarnation: int, request: int) -> list[Reply]:
        """Returns the answer to a request again, if it has been answered: one for each track that it was about."""
        return [reply for track in self.tracks for reply in track.answers.again(worker, incarnation, request)]

    def gradient_of(self, worker: int, incarnation: int, request: int) -> Key | None:
        """Returns the gradient that a request pushed, if it is here and undecided."""
        found = (track.gradients.of_request(worker, incarnation, request) for track in self.tracks)
        return next((key for key in found if key is not None), None)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self) -> ShardSnapshot:
        """Returns all of it as it is now; the current versions' slots are kept until `snapshot_written`."""
        whole, *others = [track.variables.snapshot() for track in self.tracks]
        for other in others:
            whole.add(other)
        return whole

    def snapshot_written(self) -> None:
        """The snapshot is on disk: its slots are free again."""
        for track in self.tracks:
            track.variables.snapshot_written()

    # -- the log ------------------------------------------------------------------------------------------------------

    def follow(self, entry: LogEntry, outcome: Outcome | None = None, *, silent: bool = False) -> list[Reply]:
        """Does what the next entry of the log says.

        Args:
            entry: The entry.
            outcome: What became of the gradient of a worker that is released.
            silent: Sends no answers: the workers have seen their release on the fast path.
        """
        self.followed += 1
        if self.broken and not isinstance(entry, End):
            return []
        match entry:
            case Apply() | Assigned():
                track = self.tracks[entry.track]
                try:
                    keep = self._keep if self.journal is not None else None
                    track.apply(entry, keep) if isinstance(entry, Apply) else track.assign(entry, keep)
                except AssertionError:
                    raise
                except Exception as error:  # a shard that cannot follow its log must not go on as if it had
                    self.broken = True
                    raise UpdateError(explain_failed_update(self.index, entry.version, error)) from error
            case Drop(keys):
                for track in self.tracks:
                    track.gradients.drop(Key(*key) for key in keys)
                    track.tables.drop(Key(*key) for key in keys)
            case Release(version=version, track=of):
                track = self.tracks[max(of, 0)]
                assert version == track.version, f"release at {version} while the shard is at {track.version}"
                those = self.tracks if of == ALL else [track]
                return [reply for t in those for reply in t.release(entry, outcome, silent=silent)]
            case RowsOut():
                return self.row_requests.answer(entry, [track.version for track in self.tracks])
            case ReadOut():
                return self.read_out(entry)
            case Snapshot():
                snapshot = self.snapshot()
                self._add_rows(entry, snapshot)
                self.snapshots.append((entry, snapshot))
                if self.journal is not None:
                    self.journal.rotate(self.place)
            case End():
                self.ended = entry
        return []

    def _add_rows(self, entry: Snapshot, snapshot: ShardSnapshot) -> None:
        """Adds the rows of tables: all, or those that have changed since the checkpoint before."""
        if not any(track.tables for track in self.tracks):
            return
        versions = [track.version for track in self.tracks]
        chain, since = self.row_chains.begin(entry, versions, sum(track.tables.rows for track in self.tracks))
        for track, version in zip(self.tracks, since, strict=True):
            rows, tables = track.tables.snapshot(chain.names, version)
            snapshot.rows += rows
            snapshot.tables += tables
        if chain.files:
            chain.changed += sum(table.rows for table in snapshot.rows)
        snapshot.chain = chain

    def _keep(self, record: Record, payload: Payload) -> None:
        """Writes an update to the journal."""
        assert self.journal is not None
        if record.keys:
            record.told = sum(track.told for track in self.tracks)
        if len(self.tracks) > 1:
            record.place = self.place + 1
        self.journal.append(record, payload)

    def replay(self, record: Record, payload: Frame) -> None:
        """Makes an update again as the journal has it."""
        self.tracks[record.track].replay(record, payload)

    def close(self) -> None:
        """Releases the memory and closes the journal."""
        for track in self.tracks:  # first: who looks for the journal of a page that is open finds it
            track.close()
        if self.journal is not None:
            self.journal.close()
            self.journal = None


def has_rows(plan: Plan) -> bool:
    """Whether the chief's module has all rows of a table of this optimizer."""
    return any(table.is_fixed for table in plan.tables)


def value_frames(plan: Plan) -> int:
    """Returns how many frames have values: two of each optimizer, and one of each of whose tables the chief's module has all rows."""
    return sum(2 + has_rows(of) for of in plan.tracks())


def states_of(create: Create) -> dict[int, StateRef]:
    """Returns the optimizers that begin with a state, with what there is of it; the frames at the end are in this order."""
    first = {0: create.optimizer} if create.optimizer is not None else {}
    return first | dict(sorted(create.states.items())) if create.restore is None else {}


def explain_failed_update(shard: int, version: int, error: Exception) -> str:
    """Returns in words that an update failed, and what would help."""
    text = " ".join(text_of(error).split())
    memory = isinstance(error, MemoryError) or any(
        sign in text.lower() for sign in ("out of memory", "allocate memory")
    )
    if isinstance(error, JournalError):
        advice = "Mend that, then start the job again: it goes on from there."
    elif memory:
        advice = "Give the ps tasks more memory, or use more of them, then start the job again."
    else:
        advice = f"Started again as it is, the job would fail again at step {version}: mend that first."
    return f"/job:ps/task:{shard}: the update to version {version} failed ({type(error).__name__}: {text}): the run ends. {advice}"
