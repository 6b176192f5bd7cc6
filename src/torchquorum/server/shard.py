"""The variables of one ps task: it holds gradients as they arrive and follows the log that shard 0 writes.

Owned by the run. No sockets and no clock in here; replies come back as data. What always holds: entries of the log are
followed in order, each once; a request is answered with the version reached at its place in the log, all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from torchquorum.server.decision_log import LogEntry
from torchquorum.server.mean_gradient import MeanGradient
from torchquorum.server.pending_gradients import PendingGradients
from torchquorum.server.reply import Delivery, Reply
from torchquorum.server.run_settings import resumed
from torchquorum.server.snapshot import (
    SavedState,
    ShardSnapshot,
    SnapshotBuilder,
    check_same_model,
    frames_of,
    read_region,
    state_frame,
)
from torchquorum.server.versions import SAVING, Versions
from torchquorum.server.worker_table import WorkerTable
from torchquorum.update.averages import Averages
from torchquorum.update.constraints import Constraints
from torchquorum.update.updater import Updater
from torchquorum.wire.channel import Peer
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor, tensor_frame
from torchquorum.wire.messages import (
    Apply,
    Assigned,
    Drop,
    End,
    Held,
    Join,
    Outcome,
    Plan,
    Push,
    Release,
    Snapshot,
    StateRef,
    Variables,
)
from torchquorum.wire.settings import Settings, changes


@dataclass(slots=True)
class Answer:
    """The last answer to a worker, to be given again when asked."""

    incarnation: int
    request: int
    version: int
    stop: bool
    outcome: Outcome | None
    state: tuple[StateRef, Frame] | None = None
    delivery: Delivery | None = None


class Shard:
    """The memory, the optimizer and the undecided gradients of one ps task.

    Attributes:
        workers: The workers that have joined here.
        gradients: What they have pushed and the log has not decided on.
        page: The fast path's page, where the plan allows it.
        revision: How often the optimizer's options were changed.
        followed: How many entries of the log were followed.
        snapshots: Those that the log has asked for and the saver has not been given.
        ended: The end of the job, once the log has it.
        broken: An update has failed, here or on another shard: of the log only its end is followed.
    """

    def __init__(
        self, index: int, plan: Plan, values: Frame, constants: Frame, version: int = 0, generation: int = 0
    ) -> None:
        self.index, self.plan, self.generation = index, plan, generation
        self.layout = layout = plan.layout()
        self.region = layout.trained[index]
        initial = frame_tensor(values, self.region.size_bytes)
        self._constants = bytes(frame_tensor(constants, layout.constants[index].size_bytes).numpy())
        self.versions = Versions(self.region, plan.num_workers, version)
        slot = self.versions.slots.bytes[self.versions.current]
        slot.copy_(initial)
        self.page = FastPage.create(plan.num_workers, len(plan.optimizer.groups)) if may_have_fastpath(plan) else None
        state_slots = plan.num_workers + 2 if self.page is not None else None
        try:
            values_now = section_views(self.region, slot)
            self.update = Updater(self.region, plan.variables, plan.optimizer, plan.schedule, values_now, state_slots)
            self.averages = Averages(plan.average, values_now) if plan.average is not None else None
            self._constraints = Constraints(plan.after_update, layout, index)
        except Exception:
            self.versions.close()
            if self.page is not None:
                self.page.close()
            raise
        self.mean = MeanGradient(self.region, plan.variables)
        if self.page is not None:
            self.versions.also_busy = self.page.workers.busy_slots
            self.update.state.also_busy = self.page.workers.busy_states
        self.workers = WorkerTable(plan.num_workers, self.region)
        self.gradients = PendingGradients(self.region)
        self.followed = self.revision = 0
        self.snapshots: list[tuple[Snapshot, ShardSnapshot]] = []
        self.ended: End | None = None
        self.broken = False
        self.journal: JournalWriter | None = None
        self._answers: dict[int, Answer] = {}
        self._given: tuple[tuple[int, int, int], list[int], torch.Tensor] | None = None  # what is about to be assigned
        self._assigned = (-1, 0, 0)

    @classmethod
    def restored(cls, index: int, plan: Plan, path: Location, generation: int = 0) -> tuple[Shard, Manifest]:
        """Makes a shard from a checkpoint, whatever the number of ps tasks it was saved with."""
        manifest = load_manifest(path)
        with CheckpointReader(path, manifest) as reader:
            check_same_model(manifest, reader, plan)
            shard = cls(index, plan, *frames_of(reader, plan, index), manifest.step, generation)
            try:
                settings = resumed(plan, manifest.plan, manifest.scalars.get("settings"))
                shard.update.change(changes(shard.update.settings, settings))
                shard.update.restore(SavedState(reader), manifest.scalars.get("optimizer", {}), manifest.step)
                if shard.averages is not None and reader.averages():
                    memory = read_region(reader, "average", shard.region, shard.layout.variables)
                    shard.averages.shadows = section_views(shard.region, memory)
            except BaseException:
                shard.close()
                raise
        return shard, manifest

    @property
    def version(self) -> int:
        """Returns how many updates this shard has applied."""
        return self.versions.version

    @property
    def uncommitted(self) -> bool:
        """Whether the journal has updates that the disk may not have yet."""
        return self.journal is not None and self.journal.uncommitted

    @property
    def busy(self) -> bool:
        """Whether there is something to apply, to measure or to end before workers may make updates by themselves."""
        return len(self.gradients) > 0 or self.mean.wanted or self.ended is not None

    # -- workers ------------------------------------------------------------------------------------------------------

    def admit(self, peer: Peer, join: Join) -> None:
        """Notes a worker that joins and opens its gradient memory."""
        self.gradients.forget(self.workers.admit(peer, join))
        if self.page is not None:
            self.page.workers.release_slots(join.worker)

    def forget(self, worker: int, incarnation: int) -> None:
        """Ends the lease of a worker that is gone; it may come back."""
        if self.workers.knows(worker, incarnation):
            self.versions.forget(worker)

    def store(self, push: Push, frames: Sequence[Frame]) -> Key:
        """Keeps this shard's part of a gradient until the log says what becomes of it.

        Raises:
            ValueError: The gradient does not fit the variables.
        """
        key = Key(push.worker, push.incarnation, push.local_step)
        memory = self.workers[push.worker].memory if push.slot >= 0 else None
        self.gradients.store(key, push, memory, frames)
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

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def take_snapshot(self) -> ShardSnapshot:
        """Returns this shard as it is now; the current version's slot is kept until `snapshot_written`."""
        builder = SnapshotBuilder(self.layout, self.index, self.version)
        slot = self.versions.lease(SAVING)
        builder.add_region("variable", self.region, self.versions.slots.sections[slot], copy=False)
        constants = self.layout.constants[self.index]
        memory = frame_tensor(self._constants, constants.size_bytes)
        builder.add_region("variable", constants, section_views(constants, memory), copy=False)
        if self.averages is not None:
            builder.add_region("average", self.region, self.averages.shadows, copy=True)
        for piece, name, values in self.update.states():
            of = self.plan.variables[piece.variable]
            whole = values.numel() == piece.numel
            builder.add(
                "optimizer",
                piece.variable,
                values.clone(),
                piece.start if whole else 0,
                state=name,
                shape=of.shape if whole else values.shape,
            )
        builder.snapshot.scalars = self.update.scalars()
        return builder.snapshot

    def snapshot_written(self) -> None:
        """The snapshot is on disk: its slot is free again."""
        self.versions.forget(SAVING)

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
            case Release(worker, incarnation, request, version, stop, averaged, state):
                assert version == self.version, f"release at {version} while the shard is at {self.version}"
                self.gradients.copy_borrowed(worker)
                self._answers[worker] = Answer(incarnation, request, version, stop, outcome)
                if state:
                    self._answers[worker].state = state_frame(self.update)
                if silent:
                    self.versions.forget(worker)
                    return []
                if averaged and self.averages is not None:
                    self.versions.lease_copy(worker, self.averages.shadows)
                else:
                    self.versions.lease(worker)
                return self.answer(worker, incarnation, request)
            case Snapshot():
                self.snapshots.append((entry, self.take_snapshot()))
                if self.journal is not None:
                    self.journal.rotate(self.version)
            case End():
                self.ended = entry
        return []

    def answer(self, worker: int, incarnation: int, request: int) -> list[Reply]:
        """Returns the answer to a request again, if it has been decided and the worker is known here.

        While it is on its way it is not sent again: over a slow link it would never come.
        """
        answer, joined = self._answers.get(worker), self.workers.get(worker)
        if answer is None or joined is None or (answer.incarnation, answer.request) != (incarnation, request):
            return []
        if joined.incarnation != incarnation:
            return []
        if answer.delivery is not None and answer.delivery.is_under_way_to(joined.peer):
            return [Reply(joined.peer, Held(request, "the rest of the variables", 0, 1, []))]
        slot = self.versions.leased(worker)
        if slot is None or not self.versions.slots.holds(slot, answer.version):
            # The worker counted as dead and its version is gone: it gets the current one.
            slot, answer.version = self.versions.lease(worker), self.version
        joining = request == joined.join_request
        shared = joined.memory is not None
        frames: list[Frame] = []
        uncopied = None
        if not shared:
            frame = tensor_frame(self.versions.slots.bytes[slot])
            uncopied = slot if self.versions.may_send_uncopied(slot) else None
            frames.append(frame if uncopied is not None else bytes(frame))
        if joining:
            frames.append(self._constants)
        message = Variables(
            request=request,
            version=answer.version,
            stop=answer.stop,
            slot=slot if shared else -1,
            ring=self.versions.slots.ref if shared and joining else None,
            fastpath=self.page.ref if self.page is not None and joined.fastpath and joining else None,
            states=self.update.state.refs if self.page is not None and joined.fastpath and joining else [],
            outcome=answer.outcome,
            lr=self.update.lr,
            generation=self.generation,
            used=self.update.used,
        )
        if answer.state is not None:
            message.optimizer = answer.state[0]
            frames.append(answer.state[1])
        if self.index == 0 and (joining or joined.revision != self.revision):
            message.settings, message.revision = self.update.settings, self.revision
        answer.delivery = Delivery(joined.peer) if not shared else None
        return [Reply(joined.peer, message, frames, uncopied, answer.delivery)]

    def _apply(self, entry: Apply) -> None:
        keys, version = [Key(*k) for k in entry.keys], entry.version
        self._change(entry.settings)
        if self.versions.adopt(version):
            self.gradients.drop(keys)  # some are here if the round was recorded in part when its last worker died
            self.update.made_elsewhere()
            return
        parts = self.gradients.take(keys)
        absent = frozenset.intersection(*(p.absent for p in parts))
        mean, slot = self._update([p.sections for p in parts], absent, version)
        if self.journal is not None:  # before any worker gets this version
            told = max(p.version for p in parts)
            record = Record(version, sorted(absent), entry.keys, entry.batches, entry.settings, told=told)
            self.journal.append(record, region_bytes(self.region, mean))
        self._publish(slot, version)

    def _change(self, settings: Settings) -> None:
        """The optimizer's options change with the update that is about to be made."""
        if settings:
            self.update.change(settings)
            self.revision += 1

    def keep_values(self, key: tuple[int, int, int], variables: list[int], frame: Frame) -> None:
        """Keeps values for an assignment: of a worker, its incarnation and its nth; those that were kept before are dropped.

        Raises:
            ValueError: They do not fit the variables.
        """
        self._given = key, variables, frame_tensor(frame, self.region.size_bytes).clone()

    def has_values(self, key: tuple[int, int, int], variables: list[int]) -> bool:
        """Whether values of these variables are kept for an assignment, or it has been made with them."""
        return key == self._assigned or (self._given is not None and self._given[:2] == (key, variables))

    def _assign(self, entry: Assigned) -> None:
        key = (entry.worker, entry.incarnation, entry.number)
        assert self._given is not None and self._given[0] == key, f"no values were given for {entry}"
        slot = self._put(self._given[2], entry.variables)
        self._given, self._assigned = None, key
        if self.journal is not None:  # before any worker gets this version
            values = region_bytes(self.region, self.versions.slots.sections[slot])
            self.journal.append(Record(entry.version, [], [], assigned=entry.variables), values)
        self._publish(slot, entry.version)

    def _put(self, memory: torch.Tensor, variables: Sequence[int]) -> int:
        """Writes the current version into a slot, but with what stands in memory for these variables. Returns the slot."""
        slots, chosen = self.versions.slots, frozenset(variables)
        slot = self.versions.next_slot()
        old, new = slots.sections[self.versions.current], slots.sections[slot]
        for section, before, after, given in zip(
            self.region.sections, old, new, section_views(self.region, memory), strict=True
        ):
            after.copy_(before)
            for piece in section.pieces:
                if piece.variable in chosen:
                    stop = piece.offset + piece.numel
                    after[piece.offset : stop].copy_(given[piece.offset : stop])
        self.update.pass_over()
        return slot

    def replay(self, record: Record, payload: Frame) -> None:
        """Makes an update again as the journal has it: the same mean through the same optimizer, so the same bits."""
        assert record.version == self.version + 1, (record.version, self.version)
        self._change(record.settings)
        memory = frame_tensor(payload, self.region.size_bytes)
        if record.assigned:
            slot = self._put(memory, record.assigned)
        else:
            _, slot = self._update([section_views(self.region, memory)], frozenset(record.absent), record.version)
        self._publish(slot, record.version)
        self.gradients.drop(Key(*key) for key in record.keys)

    def _update(
        self, gradients: Sequence[Sequence[torch.Tensor]], absent: frozenset[int], version: int
    ) -> tuple[Sequence[torch.Tensor], int]:
        slots = self.versions.slots
        slot = self.versions.next_slot()
        mean = self.update.apply(slots.sections[self.versions.current], slots.sections[slot], gradients, absent)
        self._constraints.apply(slots.sections[slot])
        if self.mean.wanted:
            self.mean.keep(version, mean, absent)
        return mean, slot

    def _publish(self, slot: int, version: int) -> None:
        slots = self.versions.slots
        self.versions.publish(slot, version)
        if self.averages is not None:
            self.averages.follow(slots.sections[slot], version)

    def close(self) -> None:
        """Releases the memory and closes the journal."""
        if self.journal is not None:
            self.journal.close()
            self.journal = None
        if self.page is not None:
            self.page.close()
        self.update.state.close()
        self.versions.close()


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
