"""The variables of one ps task: it stores gradients as they arrive and follows the log that shard 0 writes.

Owned by the ps thread. No sockets and no clock in here; replies come back as data. What always holds: entries of the log
are followed in order, each once; a request is answered with the version reached at its place in the log, all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchquorum.errors import TaskLostError
from torchquorum.formats.checkpoint import Reader, load_manifest
from torchquorum.formats.checkpoint_manifest import Manifest
from torchquorum.formats.journal import JournalError, JournalWriter, Record
from torchquorum.formats.storage import Location
from torchquorum.placement.layout import Layout
from torchquorum.rules.quorum import Key, remembered_lives
from torchquorum.server.average import Averages
from torchquorum.server.board_rule import may_have_board
from torchquorum.server.difference import check_same_plan
from torchquorum.server.mean import MeanGradient
from torchquorum.server.snapshot import SavedState, Snapshot, Taker, check_same_model, frames_of, read_region
from torchquorum.server.update import Update
from torchquorum.server.versions import SAVING, Versions
from torchquorum.transport.board import Board
from torchquorum.transport.channel import Peer
from torchquorum.transport.codec import Frame
from torchquorum.transport.lane import Room
from torchquorum.transport.memory import frame_tensor, tensor_frame
from torchquorum.transport.messages import (
    Apply,
    Drop,
    End,
    Join,
    MemoryRef,
    Message,
    Outcome,
    Plan,
    Push,
    Release,
    Variables,
)
from torchquorum.transport.messages import Snapshot as SnapshotEntry
from torchquorum.transport.slots import Slots, region_bytes, section_views


@dataclass(slots=True)
class Reply:
    """A message to a peer; `slot` is the version slot whose bytes are among the frames, uncopied."""

    peer: Peer
    message: Message
    frames: list[Frame] = field(default_factory=list)
    slot: int | None = None


@dataclass(slots=True)
class Gradient:
    """This shard's part of a gradient: its sections, and the variables that have none in it.

    While `borrowed` it lies in the worker's shared memory, or where its lane puts the next message, which may be written
    again once the worker is released.
    """

    sections: list[torch.Tensor]
    absent: frozenset[int]
    borrowed: bool


@dataclass(slots=True)
class Guest:
    """A worker as this shard knows it; `memory` is its gradient slots, None if it sends frames.

    `newest` is its latest request heard of here: an older one that comes now was late or doubled on its way.
    """

    incarnation: int
    peer: Peer
    memory: Slots | None
    join_request: int
    newest: int
    gradients: MemoryRef | None = None
    on_board: bool = False


@dataclass(slots=True)
class Answer:
    """The last answer to a worker, to be given again when asked."""

    incarnation: int
    request: int
    version: int
    stop: bool
    outcome: Outcome | None


class Shard:
    """The memory, the optimizer and the open gradients of one ps task."""

    def __init__(self, index: int, plan: Plan, values: Frame, constants: Frame, version: int = 0) -> None:
        self.index, self.plan = index, plan
        self.layout: Layout = plan.layout()
        self.region = self.layout.trained[index]
        initial = frame_tensor(values, self.region.size_bytes)
        self._constants = bytes(frame_tensor(constants, self.layout.constants[index].size_bytes).numpy())
        self.versions = Versions(self.region, plan.num_workers, version)
        slot = self.versions.slots.bytes[self.versions.current]
        slot.copy_(initial)
        try:
            values_now = section_views(self.region, slot)
            self.update = Update(self.region, plan.variables, plan.optimizer, plan.schedule, values_now)
            self.averages = Averages(plan.average, values_now) if plan.average is not None else None
        except Exception:
            self.versions.close()
            raise
        self.mean = MeanGradient(self.region, plan.variables)
        self.board = Board.create(plan.num_workers, len(plan.optimizer.groups)) if may_have_board(plan) else None
        if self.board is not None:
            self.versions.also_busy = self.board.busy
        self.made: dict[int, int] = {}  # versions that workers made on the board, and their slots
        self.reign = 0
        self.followed = 0
        self.taken: list[tuple[SnapshotEntry, Snapshot]] = []
        self.ended: End | None = None
        self.journal: JournalWriter | None = None
        self._gradients: dict[Key, Gradient] = {}
        self._guests: dict[int, Guest] = {}
        self._answers: dict[int, Answer] = {}
        self._stored: dict[int, tuple[int, Key]] = {}
        self._replaced: dict[tuple[int, int], None] = {}
        self._decided: dict[tuple[int, int], int] = {}

    @classmethod
    def restored(cls, index: int, plan: Plan, path: Location) -> tuple[Shard, Manifest]:
        """Makes a shard from a checkpoint, whatever the number of ps tasks it was saved with."""
        manifest = load_manifest(path)
        with Reader(path, manifest) as reader:
            check_same_model(manifest, reader, plan)
            shard = cls(index, plan, *frames_of(reader, plan, index), manifest.step)
            try:
                shard.update.restore(SavedState(reader), manifest.scalars.get("optimizer", {}), manifest.step)
                if shard.averages is not None and reader.averages():
                    memory = read_region(reader, "average", shard.region, shard.layout.variables)
                    shard.averages.shadows = section_views(shard.region, memory)
            except BaseException:
                shard.close()
                raise
        return shard, manifest

    def take_snapshot(self) -> Snapshot:
        """Returns this shard as it is now; the current version's slot is kept until `snapshot_written`."""
        taker = Taker(self.layout, self.index, self.version)
        slot = self.versions.lease(SAVING)
        taker.add_region("variable", self.region, self.versions.slots.sections[slot], copy=False)
        constants = self.layout.constants[self.index]
        memory = frame_tensor(self._constants, constants.size_bytes)
        taker.add_region("variable", constants, section_views(constants, memory), copy=False)
        if self.averages is not None:
            taker.add_region("average", self.region, self.averages.shadows, copy=True)
        for piece, name, values in self.update.states():
            of = self.plan.variables[piece.variable]
            whole = values.numel() == piece.numel
            taker.add(
                "optimizer",
                piece.variable,
                values.clone(),
                piece.start if whole else 0,
                state=name,
                shape=of.shape if whole else values.shape,
            )
        taker.snapshot.scalars = self.update.scalars()
        return taker.snapshot

    def snapshot_written(self) -> None:
        """The snapshot is on disk: its slot is free again."""
        self.versions.forget(SAVING)

    @property
    def version(self) -> int:
        """Returns how many updates this shard has applied."""
        return self.versions.version

    def check_plan(self, plan: Plan, who: str) -> None:
        """Raises RefusedError if a task comes with another model, optimizer or rule."""
        check_same_plan(self.plan, plan, who)

    # -- workers ------------------------------------------------------------------------------------------------------

    def welcome(self, peer: Peer, join: Join) -> None:
        """Notes a worker and opens its gradient memory."""
        memory = self._open(join.gradients) if join.gradients is not None else None
        before = self._guests.get(join.worker)
        if before is not None and before.incarnation != join.incarnation:
            self._replaced[join.worker, before.incarnation] = None
            while len(self._replaced) > remembered_lives(self.plan.num_workers):
                life = next(iter(self._replaced))
                del self._replaced[life]
                self._decided.pop(life, None)
        self._guests[join.worker] = Guest(
            join.incarnation,
            peer,
            memory,
            join.request,
            join.request,
            join.gradients,
            join.board and memory is not None,
        )
        if self.board is not None:
            self.board.release_slots(join.worker)

    def _open(self, ref: MemoryRef) -> Slots:
        return Slots.open(ref, self.region)

    def on_board(self, worker: int, incarnation: int) -> bool:
        """Whether a worker shares memory with this ps and knows how to use the board."""
        guest = self._guests.get(worker)
        return guest is not None and guest.incarnation == incarnation and guest.on_board

    def gradients_of(self, worker: int) -> MemoryRef | None:
        """Returns where a worker's gradients lie."""
        return self._guests[worker].gradients

    @property
    def undecided_gradients(self) -> bool:
        """Whether there are gradients here that the log has not spoken of."""
        return bool(self._gradients)

    def peer_of(self, worker: int) -> Peer | None:
        """Returns where a worker's last request came from."""
        guest = self._guests.get(worker)
        return guest.peer if guest is not None else None

    def is_join(self, worker: int, request: int) -> bool:
        """Whether a request is the one by which the worker joined."""
        guest = self._guests.get(worker)
        return guest is not None and guest.join_request == request

    def joined_by(self, join: Join) -> bool:
        """Whether this very join has been noted; a worker may join again with other memory."""
        guest = self._guests.get(join.worker)
        return guest is not None and (guest.incarnation, guest.join_request) == (join.incarnation, join.request)

    def knows(self, worker: int, incarnation: int) -> bool:
        """Whether this incarnation of a worker has joined here."""
        guest = self._guests.get(worker)
        return guest is not None and guest.incarnation == incarnation

    def replaced(self, worker: int, incarnation: int) -> bool:
        """Whether this incarnation of a worker was here and a newer one has taken its place."""
        return (worker, incarnation) in self._replaced

    def heard_from(self, worker: int, peer: Peer, request: int) -> bool:
        """A known worker's answers go to where its last request came from.

        Returns:
            False if the request is older than its newest: the worker has its answer and has gone on.
        """
        guest = self._guests[worker]
        if request < guest.newest:
            return False
        guest.peer, guest.newest = peer, request
        return True

    def forget(self, worker: int, incarnation: int) -> None:
        """Ends the lease of a worker that is gone; it may come back."""
        if self.knows(worker, incarnation):
            self.versions.forget(worker)

    def store(self, push: Push, frames: Sequence[Frame]) -> Key:
        """Keeps this shard's part of a gradient until the log says what becomes of it.

        Raises:
            ValueError: The gradient does not fit the variables.
        """
        key = Key(push.worker, push.incarnation, push.local_step)
        if push.slot >= 0:
            memory = self._guests[push.worker].memory
            if memory is None or push.slot >= len(memory):
                raise ValueError(f"gradient slot {push.slot} of worker {push.worker} is not known here")
            sections = memory.sections[push.slot]
        else:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} tensor frames, expected 1")
            sections = self._cut(frames[0])
        self._gradients[key] = Gradient(sections, frozenset(push.absent), borrowed=True)
        self.brought_by(push.request, key)
        return key

    def _cut(self, frame: Frame) -> list[torch.Tensor]:
        """Returns the sections of a received gradient; views of memory that is used again are made once."""
        room = frame.obj if isinstance(frame, memoryview) else None
        if not isinstance(room, Room):
            return section_views(self.region, frame_tensor(frame, self.region.size_bytes))
        kept = room.cut
        if not (isinstance(kept, tuple) and kept[0] is self.region):
            views = section_views(self.region, frame_tensor(frame, self.region.size_bytes))
            kept = room.cut = (self.region, views)
        return kept[1]

    def store_given(self, key: Key, request: int) -> None:
        """Keeps a gradient that was given on the board and lies in its worker's memory."""
        memory = self._guests[key.worker].memory
        assert memory is not None, "only who shares memory gives on the board"
        self._gradients[key] = Gradient(memory.sections[0], frozenset(), borrowed=True)
        self.brought_by(request, key)

    def brought_by(self, request: int, key: Key) -> None:
        """Notes which request brought a gradient, the latest if several did."""
        self._stored[key.worker] = (request, key)

    def undecided(self, worker: int, incarnation: int, request: int) -> Key | None:
        """Returns the gradient that a request brought, if it is here and undecided."""
        stored, key = self._stored.get(worker, (-1, Key(-1, -1, -1)))
        return key if (stored, key.incarnation) == (request, incarnation) and self.holds(key) else None

    def decided(self, key: Key) -> bool:
        """Whether the log has spoken of this gradient, or of a later one of its worker: it is a late duplicate."""
        return key.local_step <= self._decided.get((key.worker, key.incarnation), 0)

    def holds(self, key: Key) -> bool:
        """Whether this gradient is here and undecided."""
        return key in self._gradients

    # -- the log ------------------------------------------------------------------------------------------------------

    def follow(
        self,
        entry: Apply | Drop | Release | SnapshotEntry | End,
        outcome: Outcome | None = None,
        *,
        told: bool = False,
    ) -> list[Reply]:
        """Does what the next entry of the log says; `told`: who is released knows it already, from the board."""
        self.followed += 1
        match entry:
            case Apply(keys, version, batches):
                try:
                    self._apply([Key(*k) for k in keys], version, batches)
                except (AssertionError, JournalError):
                    raise
                except Exception as error:  # a shard that cannot follow its log must not go on as if it had
                    raise TaskLostError(
                        f"/job:ps/task:{self.index}: the update to version {version} failed ({type(error).__name__}: {error}), "
                        "and this task ends, as its variables may be half of it. Start the job again: it goes on from the last "
                        "checkpoint; if memory was short, give it more, or more ps tasks."
                    ) from error
            case Drop(keys):
                for key in keys:
                    self._gradients.pop(Key(*key), None)
                    self._decide(Key(*key))
            case Release(worker, incarnation, request, version, stop, averaged):
                assert version == self.version, f"release at {version} while the shard is at {self.version}"
                self._keep_undecided(worker)
                self._answers[worker] = Answer(incarnation, request, version, stop, outcome)
                if told:
                    self.versions.forget(worker)
                    return []
                if averaged and self.averages is not None:
                    self.versions.lease_copy(worker, self.averages.shadows)
                else:
                    self.versions.lease(worker)
                return self.answer(worker, incarnation, request)
            case SnapshotEntry():
                self.taken.append((entry, self.take_snapshot()))
                if self.journal is not None:
                    self.journal.rotate(self.version)
            case End():
                self.ended = entry
        return []

    def answer(self, worker: int, incarnation: int, request: int) -> list[Reply]:
        """Returns the answer to a request again, if it has been decided and the worker is known here."""
        answer, guest = self._answers.get(worker), self._guests.get(worker)
        if answer is None or guest is None or (answer.incarnation, answer.request) != (incarnation, request):
            return []
        if guest.incarnation != incarnation:
            return []
        slot = self.versions.leased(worker)
        if slot is None or not self.versions.slots.holds(slot, answer.version):
            # The worker was taken for dead and its version is gone: it gets the current one.
            slot, answer.version = self.versions.lease(worker), self.version
        joining = request == guest.join_request
        shared = guest.memory is not None
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
            board=self.board.ref if self.board is not None and guest.on_board and joining else None,
            outcome=answer.outcome,
            lr=self.update.lr,
            reign=self.reign,
        )
        return [Reply(guest.peer, message, frames, uncopied)]

    def _decide(self, key: Key) -> None:
        life = key.worker, key.incarnation
        self._decided[life] = max(key.local_step, self._decided.get(life, 0))

    def _keep_undecided(self, worker: int) -> None:
        """A worker goes on while its gradient still waits for a round: what lies in its memory is copied."""
        for key, gradient in self._gradients.items():
            if key.worker == worker and gradient.borrowed:
                gradient.sections = [section.clone() for section in gradient.sections]
                gradient.borrowed = False

    def _apply(self, keys: Sequence[Key], version: int, batches: dict[str, list[int]]) -> None:
        if version in self.made:
            for key in keys:
                self._decide(key)
                self._gradients.pop(key, None)  # of a round that was recorded in part when its last worker died
            self.update.made_elsewhere()
            self.versions.adopt(self.made.pop(version), version)
            return
        parts = [self._gradients.pop(key) for key in keys]
        for key in keys:
            self._decide(key)
        absent = frozenset.intersection(*(p.absent for p in parts))
        mean, slot = self._update([p.sections for p in parts], absent, version)
        if self.journal is not None:  # before anybody hears of this version
            record = Record(version, sorted(absent), [(k.worker, k.incarnation, k.local_step) for k in keys], batches)
            self.journal.append(record, region_bytes(self.region, mean))
        self._publish(slot, version)

    def replay(self, record: Record, payload: Frame) -> None:
        """Makes an update again as the journal has it: the same mean through the same optimizer, so the same bits."""
        assert record.version == self.version + 1, (record.version, self.version)
        sections = section_views(self.region, frame_tensor(payload, self.region.size_bytes))
        _, slot = self._update([sections], frozenset(record.absent), record.version)
        self._publish(slot, record.version)
        for key in record.keys:
            self._decide(Key(*key))

    def _update(
        self, gradients: Sequence[Sequence[torch.Tensor]], absent: frozenset[int], version: int
    ) -> tuple[Sequence[torch.Tensor], int]:
        slots = self.versions.slots
        slot = self.versions.next_slot()
        mean = self.update.apply(slots.sections[self.versions.current], slots.sections[slot], gradients, absent)
        if self.mean.wanted:
            self.mean.keep(version, mean, absent)
        return mean, slot

    def _publish(self, slot: int, version: int) -> None:
        slots = self.versions.slots
        self.versions.publish(slot, version)
        if self.averages is not None:
            self.averages.follow(slots.sections[slot], version)

    def close(self) -> None:
        """Gives the memory and the journal up."""
        if self.journal is not None:
            self.journal.close()
            self.journal = None
        if self.board is not None:
            self.board.close()
        self.versions.close()
