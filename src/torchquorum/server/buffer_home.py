"""The home of a model's buffers: what workers have sent of them to ps task 0, and which of them are the run's.

Owned by `Leading`. Under mode `chief` the run's buffers are the chief's, or, while it is dead, those of the
live worker with the lowest index; under `average` they are the mean over the live workers, of whole numbers the maximum. What
always holds: a worker is asked for its buffers and gives them between two of its steps; one that dies, or takes more than
`ANSWER_S`, is left out; when the run is over each worker counts with what it had at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

import torchquorum.wire.messages as m
from torchquorum.errors import RefusedError
from torchquorum.formats.checkpoint import CheckpointReader
from torchquorum.formats.checkpoint_manifest import Spec, Stored
from torchquorum.formats.checkpoint_write import BUFFERS, tensor_key
from torchquorum.formats.storage import locate
from torchquorum.server.reply import Reply
from torchquorum.wire.channel import Peer
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor, tensor_frame
from torchquorum.wire.packing import Packing

PeerOf = Callable[[int], Peer | None]
Say = Callable[[str], None]

ANSWER_S = 30.0
REMEMBERED = 2
REMEMBERED_ANSWERS = 16
READERS = 1 << 62  # the number of the request for those who only read, who are no workers


@dataclass(slots=True)
class Request:
    """A worker wants the run's buffers; `wanted` are the workers whose buffers make them."""

    peer: Peer
    message: m.TakeBuffers
    begun_at: float
    wanted: list[int]
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    asked_at: float = 0.0


class BufferHome:
    """The buffers of a run, packed as they travel.

    Args:
        plan: The run's plan.
        initial: The chief's buffers at the start.
        version: The version that the run begins or goes on at.
        peer_of: Where a worker can be reached.
        say: Prints a line for people.

    Attributes:
        given: Hears of what workers are given.
    """

    def __init__(self, plan: m.Plan, initial: torch.Tensor, version: int, peer_of: PeerOf, say: Say) -> None:
        self.mode, self._num_workers = plan.buffers_mode, plan.num_workers
        self._packing = Packing(plan.buffers)
        self._home, self._sources, self._began_at = initial, [0], version
        self._peer_of, self._say = peer_of, say
        self.given: Callable[[m.TakeBuffers, Sequence[int], torch.Tensor], None] = lambda _take, _whose, _values: None
        self._restored: dict[int, torch.Tensor] = {}
        self._by_version: dict[int, dict[int, torch.Tensor]] = {}
        self._final: dict[int, torch.Tensor] = {}
        self._requests: dict[int, Request] = {}
        self._unclaimed: dict[int, dict[int, torch.Tensor]] = {}  # sent for a request that has not come yet
        self._answered: dict[int, Reply] = {}
        self._given: tuple[int, torch.Tensor] = (0, initial)  # the number of what readers are given, and that
        self._read_at = self._asked_for_readers = (version, 0.0)  # version and time

    @classmethod
    def opened(cls, plan: m.Plan, frame: Frame, path: str | None, peer_of: PeerOf, say: Say) -> BufferHome:
        """Makes the home from what the chief has, and, if there is a checkpoint, from what was saved."""
        initial = frame_tensor(frame, Packing(plan.buffers).size_bytes).clone()
        if path is None:
            return cls(plan, initial, 0, peer_of, say)
        with CheckpointReader(locate(path)) as reader:
            home = cls(plan, initial, reader.manifest.step, peer_of, say)
            home._restore(reader)
        home._note_for_readers()
        return home

    def _restore(self, reader: CheckpointReader) -> None:
        there = reader.buffers()
        missing = [name for name in self._packing.specs if name not in there]
        if missing and there:
            self._say(
                f"{reader.path} holds no buffer {', '.join(missing[:5])}: it begins as the chief has it; was it added since?"
            )
        elif missing:
            self._say(f"{reader.path} holds no buffers of the model: they begin as the chief has them")
        self._read(reader, "", there, self._home)
        for worker in range(self._num_workers):
            owner = f"worker {worker}"
            own = reader.buffers(owner)
            self._restored[worker] = self._home.clone() if own else self._home
            self._read(reader, owner, own, self._restored[worker])

    def _read(self, reader: CheckpointReader, owner: str, names: Mapping[str, Spec], memory: torch.Tensor) -> None:
        for name, view in self._packing.views(memory).items():
            if name in names:
                spec = self._packing.specs[name]
                expect = Spec(tuple(spec.shape), spec.dtype)
                view.copy_(reader.read("buffer", name, owner, expect=expect).view(spec.shape))

    # -- what workers give and ask ------------------------------------------------------------------------------------

    def receive(self, message: m.Buffers, frames: Sequence[Frame], now: float, alive: Sequence[int]) -> list[Reply]:
        """Takes a worker's buffers; returns the answers to those who waited for them."""
        if len(frames) != 1:
            raise ValueError(f"{len(frames)} tensor frames, expected 1")
        values = frame_tensor(frames[0], self._packing.size_bytes)
        if message.final:
            self._final[message.worker] = values
        if message.number >= 0:
            request = self._requests.get(message.number)
            if request is not None:
                request.received[message.worker] = values
            else:  # its own, sent just before it asks
                self._unclaimed[message.number] = {message.worker: values}
                while len(self._unclaimed) > REMEMBERED_ANSWERS:
                    del self._unclaimed[next(iter(self._unclaimed))]
        else:
            known = self._by_version.setdefault(message.worker, {})
            known[message.version] = values
            while len(known) > REMEMBERED:
                del known[min(known)]
        return self.tick(now, alive)

    def take(self, peer: Peer, message: m.TakeBuffers, version: int, now: float, alive: Sequence[int]) -> list[Reply]:
        """A worker wants the run's buffers: answers at once, or asks those that they come from."""
        if message.number in self._requests:
            return [Reply(peer, m.Alive(version, False)), *self.tick(now, alive)]
        before = self._answered.get(message.worker)
        if (
            before is not None
            and isinstance(before.message, m.SharedBuffers)
            and before.message.number == message.number
        ):
            return [before]  # it was lost on its way
        if message.joining:
            self._final.pop(message.worker, None)
            restored = self._restored.pop(message.worker, None)
            if restored is not None:
                return [self._answer(peer, message, restored, [message.worker])]
            if version == self._began_at:
                return [self._answer(peer, message, self._home, self._sources)]
        wanted = self._contributors(alive, besides=message.worker if message.joining else None)
        received = self._unclaimed.pop(message.number, {})
        self._requests[message.number] = Request(peer, message, now, wanted, received)
        return self.tick(now, alive)

    def _contributors(self, alive: Sequence[int], besides: int | None) -> list[int]:
        there = sorted({*alive, *self._final} - {besides})
        return there if self.mode == "average" else there[:1]

    @property
    def unclaimed(self) -> list[int]:
        """Returns the numbers of requests that have not come, for which buffers were sent."""
        return list(self._unclaimed)

    def tick(self, now: float, alive: Sequence[int]) -> list[Reply]:
        """Answers the requests that have all they wait for, and asks again for what is missing."""
        replies: list[Reply] = []
        for number, request in list(self._requests.items()):
            for worker in request.wanted:
                if worker in self._final:
                    request.received.setdefault(worker, self._final[worker])
            missing = [w for w in request.wanted if w not in request.received and w in alive]
            if not missing and not request.received:  # they have died or left: others may do
                joining = request.message.worker if request.message.joining else None
                request.wanted = missing = self._contributors(alive, besides=joining)
            if missing and now - request.begun_at < ANSWER_S:
                if now - request.asked_at >= 1.0:
                    request.asked_at = now
                    peers = [self._peer_of(worker) for worker in missing]
                    replies += [Reply(peer, m.Wanted(number)) for peer in peers if peer is not None]
                continue
            del self._requests[number]
            sources = [w for w in request.wanted if w in request.received]
            if missing:
                names = ", ".join(f"/job:worker/task:{w}" for w in missing)
                self._say(f"{names} gave no buffers within {ANSWER_S:.0f} s and is left out")
            if sources:
                self._home, self._sources = self.combine([request.received[w] for w in sources]), sources
            if number == READERS:
                self._read_at = self._asked_for_readers
                self._note_for_readers()
                continue
            replies.append(self._answer(request.peer, request.message, self._home, self._sources))
        return replies

    # -- those who only read ------------------------------------------------------------------------------------------

    def is_fresh(self, version: int, now: float, within_s: float) -> bool:
        """Whether the buffers that readers get are those of this version, or no older than so many seconds."""
        return READERS not in self._requests and (self._read_at[0] == version or now - self._read_at[1] < within_s)

    def ask_for_readers(self, version: int, now: float, alive: Sequence[int]) -> list[Reply]:
        """Asks those that the run's buffers come from for theirs, unless that has been done."""
        if READERS not in self._requests:
            self._asked_for_readers = (version, now)
            asked = m.TakeBuffers(-1, 0, READERS, False)
            self._requests[READERS] = Request(b"", asked, now, self._contributors(alive, besides=None))
        return self.tick(now, alive)

    @property
    def for_readers(self) -> tuple[int, Frame]:
        """Returns the buffers that readers get, with a number that changes when they do."""
        return self._given[0], tensor_frame(self._given[1])

    def _note_for_readers(self) -> None:
        number, before = self._given
        if not torch.equal(before, self._home):
            self._given = (number + 1, self._home.clone())

    def _answer(self, peer: Peer, request: m.TakeBuffers, values: torch.Tensor, sources: Sequence[int]) -> Reply:
        reply = Reply(peer, m.SharedBuffers(request.number, list(sources)), [tensor_frame(values)])
        self._answered[request.worker] = reply
        self.given(request, sources, values)
        return reply

    def combine(self, packed: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the mean of floats, made in float64 in order of worker and rounded once; of whole numbers the maximum."""
        if len(packed) == 1:
            return packed[0]
        found = {}
        each = [self._packing.views(memory) for memory in packed]
        for name in self._packing.specs:
            values = torch.stack([views[name] for views in each])
            if values.dtype.is_floating_point:
                found[name] = values.double().mean(0).to(values.dtype)
            else:
                found[name] = values.any(0) if values.dtype == torch.bool else values.amax(0)
        return self._packing.pack(found)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def has(self, worker: int, version: int) -> bool:
        """Whether a worker's buffers are known as it first held a version."""
        return version in self._by_version.get(worker, {})

    def knows(self, worker: int) -> bool:
        """Whether a worker has sent its buffers, of whatever version."""
        return bool(self._by_version.get(worker))

    def save(self, version: int, alive: Sequence[int], *, exact: bool) -> tuple[list[Stored], dict[str, torch.Tensor]]:
        """Returns what a checkpoint holds of the buffers: the run's, and each worker's own where they differ.

        Args:
            version: The version that is saved.
            alive: The live workers.
            exact: Whether only buffers of that very version count; otherwise a worker's latest do.
        """
        own: dict[int, torch.Tensor] = {}
        for worker, known in sorted(self._by_version.items()):
            if version in known or (not exact and known):
                own[worker] = known.get(version, known[max(known)])
        sources = [w for w in own if w in alive or w in self._final or version in self._by_version[w]]
        sources = sources if self.mode == "average" else sources[:1]
        if sources:
            self._home, self._sources = self.combine([own[w] for w in sources]), sources
        pieces: list[Stored] = []
        tensors: dict[str, torch.Tensor] = {}
        home = self._packing.views(self._home)
        self._store("", home, pieces, tensors)
        for worker, memory in own.items():
            differ = {n: v for n, v in self._packing.views(memory).items() if not torch.equal(v, home[n])}
            self._store(f"worker {worker}", differ, pieces, tensors)
        return pieces, tensors

    def _store(
        self, owner: str, values: Mapping[str, torch.Tensor], pieces: list[Stored], tensors: dict[str, torch.Tensor]
    ) -> None:
        for name, value in values.items():
            key, spec = tensor_key("buffer", name, owner), self._packing.specs[name]
            tensors[key] = value.reshape(-1)
            pieces.append(
                Stored(
                    kind="buffer",
                    variable=name,
                    state=owner,
                    file=BUFFERS,
                    key=key,
                    start=0,
                    stop=value.numel(),
                    shape=tuple(spec.shape),
                    dtype=spec.dtype,
                )
            )


def check_same_buffers(ours: m.Plan, theirs: m.Plan, who: str) -> None:
    """Raises RefusedError, naming what differs, unless a task comes with the buffers that the chief has."""
    if ours.buffers_mode != theirs.buffers_mode:
        raise RefusedError(
            f"{who} has buffers={theirs.buffers_mode!r}, the chief has buffers={ours.buffers_mode!r}. "
            "Start every task with the same program and the same arguments."
        )
    here, there = {str(spec) for spec in ours.buffers}, {str(spec) for spec in theirs.buffers}
    if here != there:
        raise RefusedError(
            f"{who} has other buffers than the chief: only there {sorted(there - here)[:5]}, only here "
            f"{sorted(here - there)[:5]}. Start every task with the same program and the same arguments."
        )
