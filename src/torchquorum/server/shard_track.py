"""One optimizer's part of a shard: its variables, the gradients for them, the answers that carry them, its page of the fast path.

Owned by the shard, which has one for each optimizer of the run, and follows the log for all of them. What always holds: nothing in here
knows of another optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from torchquorum.errors import UpdateError
from torchquorum.fastpath.page import FastPage, states_in_reach
from torchquorum.fastpath.policy import may_have_fastpath
from torchquorum.formats.journal import Record
from torchquorum.formats.journal_write import Payload
from torchquorum.memory.slots import region_bytes, section_views
from torchquorum.rules.quorum import Key
from torchquorum.server.answers import Answers
from torchquorum.server.given_state import GivenState
from torchquorum.server.given_values import Given, GivenValues
from torchquorum.server.pending_gradients import PendingGradients
from torchquorum.server.reply import Reply
from torchquorum.server.shard_tables import RowUpdate, ShardTables, with_rows
from torchquorum.server.shard_variables import ShardVariables
from torchquorum.server.version_images import VersionImages
from torchquorum.server.worker_table import TrackWorkers
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor, tensor_frame
from torchquorum.wire.messages import Apply, Assigned, Outcome, Plan, Push, Release, StateRef, Values

Keep = Callable[[Record, Payload], None]


class ShardTrack:
    """The variables and the undecided gradients of one optimizer on one ps task.

    Args:
        index: Which optimizer of the run.
        shard: Which ps task.
        plan: The plan of this optimizer.
        values: The first values of the trained variables.
        constants: Those of the others.
        workers: Those who have joined.
        version: The version that these are.
        generation: Which creation of the variables this is.

    Attributes:
        variables: Their values, and what changes them.
        workers: The workers that have joined, and their memory for this optimizer's gradients.
        gradients: What they have pushed and the log has not decided on.
        given: What is about to be assigned.
        answers: The answers to their requests.
        page: The fast path's page, where the plan allows it.
        images: Copies of its versions, for those who only read.
        tables: The rows of its tables.
        evicted: How many of these have gone since this was last set to 0.
        told: The newest version of which the gradients say that every shard had told a worker, where there is a journal.
    """

    def __init__(
        self,
        index: int,
        shard: int,
        plan: Plan,
        values: Frame,
        constants: Frame,
        workers: TrackWorkers,
        *,
        version: int = 0,
        generation: int = 0,
    ) -> None:
        self.index, self.plan, self.workers = index, plan, workers
        self.page = FastPage.create(plan.num_workers, len(plan.optimizer.groups)) if may_have_fastpath(plan) else None
        state_slots = states_in_reach(plan.num_workers) + 2 if self.page is not None else None
        try:
            self.variables = ShardVariables(shard, plan, values, constants, version=version, state_slots=state_slots)
        except Exception:
            if self.page is not None:
                self.page.close()
            raise
        self.region = self.variables.region
        if self.page is not None:
            self.variables.versions.also_busy = self.page.busy_slots
            self.variables.update.state.also_busy = self.page.busy_states
        self.images = VersionImages(self.variables, len(plan.variables), self.page)
        self.tables = ShardTables(plan, shard)
        self.gradients = PendingGradients(self.region, plan.compress)
        self.given, self.evicted, self.told = GivenValues(), 0, version
        self.answers = Answers(shard, generation, self.variables, workers, self.page)

    @property
    def version(self) -> int:
        """Returns how many updates of this optimizer were applied here."""
        return self.variables.versions.version

    @property
    def busy(self) -> bool:
        """Whether there is something to apply or to measure before workers may make updates by themselves."""
        return len(self.gradients) > 0 or self.variables.mean.wanted

    def store(self, push: Push, frames: Sequence[Frame]) -> Key:
        """Keeps this shard's part of a gradient until the log says what becomes of it.

        Raises:
            ValueError: The gradient does not fit the variables.
        """
        key = Key(push.worker, push.incarnation, push.local_step)
        memory = self.workers.memory_of(push.worker) if push.slot >= 0 else None
        dense = 0 if memory is not None else 1
        if self.tables:
            self.tables.store(key, push.rows, self._rows_of(push) if push.rows_at >= 0 else frames[dense:])
        self.gradients.store(key, push, memory, frames[:dense] if self.tables else frames)
        return key

    def _rows_of(self, push: Push) -> list[Frame]:
        """Returns the frame of a gradient's rows, which lies in its worker's memory."""
        memory = self.workers.rows_of(push.worker)
        if memory is None:
            raise ValueError(f"worker {push.worker} has no memory for rows here")
        return [tensor_frame(memory.bytes(push.rows_at, self.tables.size_bytes(push.rows)))]

    def store_shared(self, key: Key, request: int) -> None:
        """Keeps a gradient of the fast path, which lies in its worker's memory.

        It may be decided on: its worker died between recording and publishing the round.
        """
        if self.gradients.is_decided(key):
            return
        memory = self.workers.memory_of(key.worker)
        assert memory is not None, "only a worker that shares memory is on the fast path"
        self.gradients.store_shared(key, memory)
        self.gradients.note_request(request, key)

    def release(self, entry: Release, outcome: Outcome | None, *, silent: bool) -> list[Reply]:
        """The log says that a request is answered now; `silent` if its worker has seen that on the fast path."""
        self.gradients.copy_borrowed(entry.worker)
        self.tables.copy_borrowed(entry.worker)
        return self.answers.release(entry, outcome, self.version, silent=silent)

    def apply(self, entry: Apply, keep: Keep | None) -> None:
        """Makes the version that the log says; with a journal, `keep` writes it there before any worker gets it."""
        keys, version = [Key(*k) for k in entry.keys], entry.version
        self.variables.change(entry.settings)
        if self.variables.versions.adopt(version):
            self.images.adopted()
            self.gradients.drop(keys)  # some are here if the round was recorded in part when its last worker died
            self.variables.update.made_elsewhere()
            return
        parts = self.gradients.take(keys)
        absent = frozenset.intersection(*(p.absent for p in parts))
        updates = self.tables.mean(keys)
        weights = self._weights([p.weight for p in parts])
        mean, slot = self.variables.make([p.sections for p in parts], absent, version, weights)
        self._apply_rows(updates, version, entry.evicted_at)
        if keep is not None:
            self.told = max(self.told, *(p.version for p in parts))
            record = Record(version, sorted(absent), entry.keys, entry.batches, entry.settings, track=self.index)
            record.rows, record.evicted_at = [(u.table, len(u.keys)) for u in updates], entry.evicted_at
            keep(record, with_rows(region_bytes(self.region, mean), updates))
        self.variables.publish(slot, version)
        self.images.changed(version, () if self.plan.after_update else absent)

    def _weights(self, given: list[float]) -> list[float]:
        """Returns how much each gradient of a round counts; empty where all count alike.

        Raises:
            UpdateError: Some workers say how much theirs count, and others do not.
        """
        if any(given) and not all(given):
            raise UpdateError(
                f"{sum(map(bool, given))} of {len(given)} gradients of a round say of how many examples they are, and the others do not: "
                "give optimizer.step(examples=...) on all workers, or on none"
            )
        return given if len(set(given)) > 1 else []

    def _apply_rows(self, updates: Sequence[RowUpdate], version: int, evicted_at: float) -> None:
        if self.tables:
            update = self.variables.update
            self.tables.apply(updates, version, update.settings, update.rates.used)
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

    def assign(self, entry: Assigned, keep: Keep | None) -> None:
        """Makes a version of given values."""
        given = self.given.take((entry.worker, entry.incarnation, entry.number))
        self.variables.change(entry.settings)
        slot = self.variables.put(given.values, entry.variables)
        if given.state is not None:
            self.variables.load(given.state)
        if keep is not None:
            self._keep_assigned(keep, entry, given, slot)
        self.variables.publish(slot, entry.version)
        self.images.assigned(entry.version, entry.variables)

    def _keep_assigned(self, keep: Keep, entry: Assigned, given: Given, slot: int) -> None:
        values = region_bytes(self.region, self.variables.versions.slots.sections[slot]) if entry.variables else b""
        record = Record(entry.version, [], [], settings=entry.settings, assigned=entry.variables, track=self.index)
        if given.state is None:
            keep(record, values)
            return
        record.state = msgspec.to_builtins(given.state.ref)
        keep(record, bytes(values) + bytes(given.state.frame))

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
            sections = section_views(self.region, memory)
            _, slot = self.variables.make([sections], frozenset(record.absent), record.version)
            self._apply_rows(updates, record.version, record.evicted_at)
        self.variables.publish(slot, record.version)
        self.images.changed(record.version)
        self.gradients.drop(Key(*key) for key in record.keys)

    def close(self) -> None:
        """Releases the memory."""
        if self.page is not None:
            self.page.close()
        self.variables.close()
