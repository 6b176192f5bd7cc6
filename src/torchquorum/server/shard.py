"""The variables of one ps task: it holds gradients as they arrive and follows the log that shard 0 writes.

Owned by the run. No sockets and no clock in here; replies come back as data. What always holds: entries of the log are
followed in order, each once; a request is answered with the version reached at its place in the log, all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from torchquorum.errors import UpdateError
from torchquorum.fastpath.page import FastPage
from torchquorum.fastpath.policy import may_have_fastpath
from torchquorum.formats.checkpoint import CheckpointReader, load_manifest
from torchquorum.formats.checkpoint_manifest import Manifest
from torchquorum.formats.journal import JournalError, JournalWriter, Record
from torchquorum.formats.storage import Location
from torchquorum.memory.slots import region_bytes, section_views
from torchquorum.rules.quorum import Key
from torchquorum.server.answers import Answers
from torchquorum.server.decision_log import LogEntry
from torchquorum.server.given_state import GivenState
from torchquorum.server.given_values import Given, GivenValues
from torchquorum.server.pending_gradients import PendingGradients
from torchquorum.server.reply import Reply
from torchquorum.server.row_requests import RowRequests
from torchquorum.server.shard_tables import RowUpdate, ShardTables, with_rows
from torchquorum.server.shard_variables import ShardVariables
from torchquorum.server.snapshot import ShardSnapshot, StateReader, check_same_model, frames_of
from torchquorum.server.worker_table import WorkerTable
from torchquorum.wire.channel import Peer
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor
from torchquorum.wire.messages import (
    Apply,
    Assigned,
    Create,
    Drop,
    End,
    Join,
    Outcome,
    Plan,
    Push,
    Release,
    RowsOut,
    Snapshot,
    StateRef,
    Values,
)


class Shard:
    """The variables, the workers and the undecided gradients of one ps task.

    Attributes:
        variables: Their values, and what changes them.
        workers: The workers that have joined here.
        gradients: What they have pushed and the log has not decided on.
        tables: Their rows.
        row_requests: Who has asked for some of them.
        given: What is about to be assigned.
        answers: The answers to their requests.
        page: The fast path's page, where the plan allows it.
        followed: How many entries of the log were followed.
        snapshots: Those that the log has asked for and the saver has not been given.
        ended: The end of the job, once the log has it.
        evicted: How many rows of tables have gone here since this was last set to 0.
        broken: An update has failed, here or on another shard: of the log only its end is followed.
    """

    def __init__(
        self, index: int, plan: Plan, values: Frame, constants: Frame, version: int = 0, generation: int = 0
    ) -> None:
        self.index, self.plan, self.generation = index, plan, generation
        self.page = FastPage.create(plan.num_workers, len(plan.optimizer.groups)) if may_have_fastpath(plan) else None
        state_slots = plan.num_workers + 2 if self.page is not None else None
        try:
            self.variables = ShardVariables(index, plan, values, constants, version=version, state_slots=state_slots)
        except Exception:
            if self.page is not None:
                self.page.close()
            raise
        self.region = self.variables.region
        self.tables = ShardTables(plan, index)
        self.row_requests = RowRequests(self.tables)
        if self.page is not None:
            self.variables.versions.also_busy = self.page.workers.busy_slots
            self.variables.update.state.also_busy = self.page.workers.busy_states
        self.workers = WorkerTable(plan.num_workers, self.region)
        self.gradients = PendingGradients(self.region, plan.compress)
        self.given = GivenValues()
        self.answers = Answers(index, generation, self.variables, self.workers, self.page)
        self.followed = 0
        self.snapshots: list[tuple[Snapshot, ShardSnapshot]] = []
        self.ended: End | None = None
        self.broken = False
        self.journal: JournalWriter | None = None
        self.evicted = 0

    @classmethod
    def created(cls, index: int, create: Create, frames: Sequence[Frame]) -> Shard:
        """Makes a shard from what the chief's variables, and its optimizer, begin with."""
        shard = cls(index, create.plan, frames[0], frames[1], generation=create.generation)
        if create.optimizer is not None:
            try:
                shard.variables.load(shard.read_state(create.optimizer, frames[-1]))
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
            shard = cls.made_of(index, plan, reader, manifest, generation)
            try:
                shard.tables.restore(reader, manifest)
            except BaseException:
                shard.close()
                raise
            return shard, manifest

    @classmethod
    def made_of(cls, index: int, plan: Plan, reader: StateReader, manifest: Manifest, generation: int = 0) -> Shard:
        """Makes a shard of a saved state of the whole run."""
        shard = cls(index, plan, *frames_of(reader, plan, index), manifest.step, generation)
        try:
            shard.variables.restore(reader, manifest)
        except BaseException:
            shard.close()
            raise
        return shard

    @property
    def version(self) -> int:
        """Returns how many updates this shard has applied."""
        return self.variables.versions.version

    @property
    def uncommitted(self) -> bool:
        """Whether the journal has updates that the disk may not have yet."""
        return self.journal is not None and self.journal.uncommitted

    @property
    def busy(self) -> bool:
        """Whether there is something to apply, to measure or to end before workers may make updates by themselves."""
        return len(self.gradients) > 0 or self.variables.mean.wanted or self.ended is not None

    # -- workers ------------------------------------------------------------------------------------------------------

    def admit(self, peer: Peer, join: Join) -> None:
        """Notes a worker that joins and opens its gradient memory."""
        self.gradients.forget(self.workers.admit(peer, join))
        if self.page is not None:
            self.page.workers.release_slots(join.worker)

    def forget(self, worker: int, incarnation: int) -> None:
        """Ends the lease of a worker that is gone; it may come back."""
        if self.workers.knows(worker, incarnation):
            self.variables.versions.forget(worker)

    def store(self, push: Push, frames: Sequence[Frame]) -> Key:
        """Keeps this shard's part of a gradient until the log says what becomes of it.

        Raises:
            ValueError: The gradient does not fit the variables.
        """
        key = Key(push.worker, push.incarnation, push.local_step)
        memory = self.workers[push.worker].memory if push.slot >= 0 else None
        dense = 0 if memory is not None else 1
        if self.tables:
            self.tables.store(key, push.rows, frames[dense:])
        self.gradients.store(key, push, memory, frames[:dense] if self.tables else frames)
        return key

    def store_shared(self, key: Key, request: int) -> None:
        """Keeps a gradient of the fast path, which lies in its worker's memory.

        It may be decided on: its worker died between recording and publishing the round.
        """
        if self.gradients.is_decided(key):
            return
        memory = self.workers[key.worker].memory
        assert memory is not None, "only a worker that shares memory is on the fast path"
        self.gradients.store_shared(key, memory)
        self.gradients.note_request(request, key)

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
                try:
                    self._apply(entry) if isinstance(entry, Apply) else self._assign(entry)
                except AssertionError:
                    raise
                except Exception as error:  # a shard that cannot follow its log must not go on as if it had
                    self.broken = True
                    raise UpdateError(explain_failed_update(self.index, entry.version, error)) from error
            case Drop(keys):
                self.gradients.drop(Key(*key) for key in keys)
                self.tables.drop(Key(*key) for key in keys)
            case Release(worker, version=version):
                assert version == self.version, f"release at {version} while the shard is at {self.version}"
                self.gradients.copy_borrowed(worker)
                self.tables.copy_borrowed(worker)
                return self.answers.release(entry, outcome, silent=silent)
            case RowsOut():
                return self.row_requests.answer(entry, self.version)
            case Snapshot():
                snapshot = self.variables.snapshot()
                snapshot.rows, snapshot.tables = self.tables.snapshot()
                self.snapshots.append((entry, snapshot))
                if self.journal is not None:
                    self.journal.rotate(self.version)
            case End():
                self.ended = entry
        return []

    def _apply(self, entry: Apply) -> None:
        keys, version = [Key(*k) for k in entry.keys], entry.version
        self.variables.change(entry.settings)
        if self.variables.versions.adopt(version):
            self.gradients.drop(keys)  # some are here if the round was recorded in part when its last worker died
            self.variables.update.made_elsewhere()
            return
        parts = self.gradients.take(keys)
        absent = frozenset.intersection(*(p.absent for p in parts))
        updates = self.tables.mean(keys)
        mean, slot = self.variables.make([p.sections for p in parts], absent, version)
        self._apply_rows(updates, version, entry.evicted_at)
        if self.journal is not None:  # before any worker gets this version
            told = max(p.version for p in parts)
            record = Record(version, sorted(absent), entry.keys, entry.batches, entry.settings, told=told)
            record.rows, record.evicted_at = [(u.table, len(u.keys)) for u in updates], entry.evicted_at
            self.journal.append(record, with_rows(region_bytes(self.region, mean), updates))
        self.variables.publish(slot, version)

    def _apply_rows(self, updates: Sequence[RowUpdate], version: int, evicted_at: float) -> None:
        if self.tables:
            update = self.variables.update
            self.tables.apply(updates, version, update.settings, update.used)
            self.evicted += self.tables.evict(version, evicted_at) if evicted_at else 0

    def keep_values(self, values: Values, frames: Sequence[Frame]) -> None:
        """Keeps what a worker gives for an assignment; what was kept before is dropped.

        Raises:
            ValueError: It does not fit the variables.
        """
        memory = frame_tensor(frames[0], self.region.size_bytes).clone() if values.variables else torch.empty(0)
        state = self.read_state(values.optimizer, frames[-1]) if values.optimizer is not None else None
        self.given.keep((values.worker, values.incarnation, values.number), Given(values.variables, memory, state))

    def read_state(self, ref: StateRef, frame: Frame) -> GivenState:
        """Returns an optimizer's state that came from a worker or stands in the journal.

        Raises:
            ValueError: It does not fit the variables.
        """
        return GivenState(ref, frame, self.region, self.plan.variables, self.plan.optimizer.name)

    def _assign(self, entry: Assigned) -> None:
        given = self.given.take((entry.worker, entry.incarnation, entry.number))
        self.variables.change(entry.settings)
        slot = self.variables.put(given.values, entry.variables)
        if given.state is not None:
            self.variables.load(given.state)
        if self.journal is not None:  # before any worker gets this version
            self._write_assigned(self.journal, entry, given, slot)
        self.variables.publish(slot, entry.version)

    def _write_assigned(self, journal: JournalWriter, entry: Assigned, given: Given, slot: int) -> None:
        values = region_bytes(self.region, self.variables.versions.slots.sections[slot]) if entry.variables else b""
        record = Record(entry.version, [], [], settings=entry.settings, assigned=entry.variables)
        if given.state is None:
            journal.append(record, values)
            return
        record.state = msgspec.to_builtins(given.state.ref)
        journal.append(record, bytes(values) + bytes(given.state.frame))

    def _replay_assigned(self, record: Record, payload: memoryview) -> int:
        size_bytes = self.region.size_bytes if record.assigned else 0
        slot = self.variables.put(frame_tensor(payload[:size_bytes], size_bytes), record.assigned)
        if record.state is not None:
            self.variables.load(self.read_state(msgspec.convert(record.state, StateRef), payload[size_bytes:]))
        return slot

    def replay(self, record: Record, payload: Frame) -> None:
        """Makes an update again as the journal has it: the same mean through the same optimizer, so the same bits."""
        assert record.version == self.version + 1, (record.version, self.version)
        self.variables.change(record.settings)
        if record.assigned or record.state is not None:
            slot = self._replay_assigned(record, memoryview(payload))
        else:
            size_bytes = self.region.size_bytes
            memory = frame_tensor(memoryview(payload)[:size_bytes], size_bytes)
            updates = self.tables.read_updates(record.rows, memoryview(payload)[size_bytes:])
            _, slot = self.variables.make(
                [section_views(self.region, memory)], frozenset(record.absent), record.version
            )
            self._apply_rows(updates, record.version, record.evicted_at)
        self.variables.publish(slot, record.version)
        self.gradients.drop(Key(*key) for key in record.keys)

    def close(self) -> None:
        """Releases the memory and closes the journal."""
        if self.journal is not None:
            self.journal.close()
            self.journal = None
        if self.page is not None:
            self.page.close()
        self.variables.close()


def explain_failed_update(shard: int, version: int, error: Exception) -> str:
    """Returns in words that an update failed, and what would help."""
    text = " ".join(str(error).split())
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
