"""What goes between a worker's parameters and the shards' memory: gradients out, variables in.

Owned by the worker's client. A ps of this host reads gradients from a slot of shared memory and offers its versions in a
ring of slots; for one elsewhere there is a buffer whose bytes are sent. What always holds: a copy from or to a GPU has
ended when a method returns, unless the method says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

import torchquorum.wire.messages as m
from torchquorum.memory.slots import Sections, Slots, section_views
from torchquorum.update.gradient_sample import sample_of
from torchquorum.wire import codec
from torchquorum.wire.channel import Choose, Pieces
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor, tensor_frame
from torchquorum.worker.flat import FlatParameters, Puller, Pusher
from torchquorum.worker.overlap import NOTHING, Overlap, is_worth_it
from torchquorum.worker.pinned import Pinned


def first_of(choosers: Sequence[Choose]) -> Choose:
    """Returns what finds memory where one of these does."""

    def choose(header: Frame, sizes: Sequence[int]) -> Sequence[memoryview] | None:
        return next((room for each in choosers if (room := each(header, sizes)) is not None), None)

    return choose


class Exchange:
    """The memory of one worker for all shards.

    Args:
        flat: The worker's parameters.
        shared: Of each ps task, whether it is on this host and memory is shared with it.
        in_place: Whether gradients may be sent from where they were computed: the next are computed after the answer.
        slots: How many slots shared gradient memory has; the gradient lies in the first.

    Raises:
        SegmentError: No shared memory can be had.
    """

    def __init__(self, flat: FlatParameters, shared: Sequence[bool], *, in_place: bool = False, slots: int = 1) -> None:
        self._flat = flat
        self._gradients: list[Slots | None] = []
        self._buffers: list[torch.Tensor | None] = []
        self._pushers: list[Pusher] = []
        self._rings: list[Slots | None] = [None] * len(shared)
        self._pullers: list[dict[int, Puller]] = [{} for _ in shared]
        self._pieces: list[Pieces | None] = [None] * len(shared)
        self._rooms: dict[int, list[memoryview] | None] = {}
        self._early: Overlap | None = None
        self._in_place = [in_place and not each for each in shared]
        self.device = flat.cuda_device
        self._pinned = Pinned(self.device) if self.device is not None else None
        try:
            for k, region in enumerate(flat.layout.trained):
                self._add(Slots.create("gradients", region, slots) if shared[k] else None, k)
        except BaseException:
            self.close()
            raise

    def _add(self, slots: Slots | None, k: int) -> None:
        region = self._flat.layout.trained[k]
        buffer = None if slots is not None else torch.zeros(region.size_bytes, dtype=torch.uint8)
        self._gradients.append(slots)
        self._buffers.append(buffer)
        memory = slots.bytes[0] if slots is not None else buffer
        assert memory is not None
        self.pin(memory)
        self._pushers.append(Pusher(self._flat, region, section_views(region, memory)))

    def pin(self, memory: torch.Tensor) -> None:
        """Lets the GPU of the parameters, if that is where they are, reach a piece of memory by itself."""
        if self._pinned is not None:
            self._pinned.add(memory)

    def copy_early(self, may: Callable[[], bool]) -> None:
        """From now on gradients leave a GPU during the backward pass, whenever `may` allows it and it is worth it."""
        if self._pinned is not None and self._pinned.complete and is_worth_it(self._flat):
            self.begin_overlap(may, torch.cuda.Stream(self.device))

    def begin_overlap(self, may: Callable[[], bool], stream: torch.cuda.Stream | None = None) -> None:
        """From now on gradients are copied during the backward pass, on a stream; without one, each at once."""
        self._early = Overlap(self._flat, self._pushers, may, stream)

    def close(self) -> None:
        """Gives the memory up."""
        if self._early is not None:
            self._early.close()
        if self._pinned is not None:
            self._pinned.close()
        for slots in self._gradients:
            if slots is not None:
                slots.close()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def memory_of(self, k: int) -> Slots | None:
        """Returns the shared memory in which shard k finds the gradients, if it is shared."""
        return self._gradients[k]

    def frames(self, k: int) -> list[Frame | Pieces]:
        """Returns what must be sent to shard k: nothing where memory is shared."""
        pieces, buffer = self._pieces[k], self._buffers[k]
        if pieces is not None:
            return [pieces]
        return [tensor_frame(buffer)] if buffer is not None else []

    def fill(self) -> list[list[int]]:
        """Puts the gradients where the shards find them; returns, of each, the variables that have none.

        What is sent is not copied but taken from where it is, unless the next gradients may come before it has left.
        """
        absent: list[list[int]] = []
        held = self._early.held() if self._early is not None else NOTHING
        with torch.no_grad():
            for k, pusher in enumerate(self._pushers):
                self._pieces[k] = pusher.in_pieces() if self._in_place[k] else None
                absent.append(pusher(held) if self._pieces[k] is None else [])
        self.settle()
        return absent

    def sections(self) -> list[Sections]:
        """Returns, of each shard, the memory in which the gradients were filled in."""
        found = []
        for k, region in enumerate(self._flat.layout.trained):
            slots, buffer = self._gradients[k], self._buffers[k]
            memory = slots.bytes[0] if slots is not None else buffer
            assert memory is not None
            found.append(section_views(region, memory))
        return found

    def norm(self) -> float:
        """Returns the norm of what was filled in last: finite if, and only if, all of it is."""
        if self._flat.gradients is not None and any(pusher.whole for pusher in self._pushers):
            return self._flat.gradients.norm()
        return math.hypot(*(pusher.norm() for pusher in self._pushers))

    def sample(self) -> int:
        """Returns a checksum of an even sample of what was filled in last."""
        return sample_of([tensor for pusher in self._pushers for tensor in pusher.on_host])

    def nonfinite(self) -> list[str]:
        """Returns the variables whose gradients hold NaN or infinity."""
        named = zip(self._flat.layout.variables, self._flat.parameters, strict=True)
        return [v.name for v, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]

    def nonfinite_variables(self) -> list[str]:
        """Returns the variables that hold NaN or infinity, as this worker has them now."""
        named = zip(self._flat.layout.variables, self._flat.parameters, strict=True)
        return [v.name for v, p in named if not bool(torch.isfinite(p.detach()).all())]

    # -- variables ----------------------------------------------------------------------------------------------------

    def load(self, k: int, message: m.Variables, frames: Sequence[Frame], new_ring: Callable[[Slots], None]) -> bool:
        """Copies a shard's variables into the parameters; False if they were overwritten meanwhile."""
        region = self._flat.layout.trained[k]
        with torch.no_grad():
            if message.slot >= 0:
                if message.ring is not None:
                    ring = self._rings[k] = Slots.open(message.ring, region)
                    self._pullers[k] = {}
                    new_ring(ring)
                ring = self._rings[k]
                assert ring is not None, "the first answer of a ps brings its memory"
                self.pull(k, message.slot)
                self.settle()
                whole = ring.holds(message.slot, message.version)
            else:
                room = self._rooms.get(k)
                if room is None or frames[0] is not room[0]:  # else the bytes have come to where they belong
                    values = frame_tensor(frames[0], region.size_bytes)
                    self._flat.load(region, section_views(region, values))
                frames, whole = frames[1:], True
            if frames:
                constants = self._flat.layout.constants[k]
                self._flat.load(constants, section_views(constants, frame_tensor(frames[0], constants.size_bytes)))
        return whole

    def room(self, k: int) -> list[memoryview] | None:
        """Returns the parameters' own memory in the order of shard k's variables; None where a copy is needed."""
        if k not in self._rooms:
            self._rooms[k] = self._flat.memory_of(self._flat.layout.trained[k])
        return self._rooms[k]

    def chooser(self, k: int, awaited: Callable[[], int | None], track: int = 0) -> Choose:
        """Returns how a channel finds memory for shard k's variables: the parameters' own, if they answer the open request.

        Args:
            k: The shard.
            awaited: Returns the number of the open request, None if there is none.
            track: Which optimizer's parameters these are.
        """

        def choose(header: Frame, sizes: Sequence[int]) -> Sequence[memoryview] | None:
            request = awaited()
            room = self.room(k) if request is not None else None
            if room is None or len(sizes) != 1 or sizes[0] != sum(map(len, room)):
                return None
            message = codec.decode(header)
            if not isinstance(message, m.Variables) or message.slot >= 0:
                return None
            return room if (message.request, message.track) == (request, track) else None

        return choose

    def pull(self, k: int, slot: int) -> None:
        """Copies a slot of shard k into the parameters; to a GPU that may go on until `settle`."""
        self._puller(k, slot)()

    def put(self, k: int, slot: int) -> None:
        """Copies the parameters into a slot of shard k; from a GPU that may go on until `settle`."""
        self._puller(k, slot).back()

    def _puller(self, k: int, slot: int) -> Puller:
        puller, ring = self._pullers[k].get(slot), self._rings[k]
        if puller is None:
            assert ring is not None
            self.pin(ring.bytes[slot])
            puller = self._pullers[k][slot] = Puller(self._flat, self._flat.layout.trained[k], ring.sections[slot])
        return puller

    def settle(self) -> None:
        """Waits for copies from and to the GPU that have been begun."""
        if self.device is not None:
            torch.cuda.current_stream(self.device).synchronize()
