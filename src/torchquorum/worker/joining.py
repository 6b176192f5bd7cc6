"""How a worker gets into a run: it greets the ps tasks, the chief creates the variables, and faster channels are taken.

Called by the link, on the worker's thread, before its first push.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

import torchquorum.wire.messages as m
from torchquorum.errors import ClusterError, LostCreationError
from torchquorum.memory.slots import section_views
from torchquorum.wire import codec
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import tensor_frame
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.loaded_state import LoadedState
from torchquorum.worker.local_buffers import CapturedBuffers
from torchquorum.worker.ps_channels import PsChannels
from torchquorum.worker.ways import Target, upgrade
from torchquorum.worker.worker_end import WorkerEnd


def greet(channels: PsChannels) -> list[m.Welcome]:
    """Greets every ps task, waits until all have answered and returns what they said."""
    end, greeting = channels.end, channels.end.greeting()
    welcomes: list[m.Welcome] = []
    for k in range(len(end.ps)):
        what, limit_s = f"{end.where(k)} to answer", end.patience.start_s
        welcomes.append(channels.ask(k, greeting, kind=m.Welcome, what=what, limit_s=limit_s, starting=True))
    return welcomes


def shares_memory(end: WorkerEnd, welcomes: Sequence[m.Welcome]) -> list[bool]:
    """Returns, of each ps task, whether it is on this host and memory is to be shared with it.

    Raises:
        ClusterError: Shared memory is demanded and cannot be had.
    """
    host = end.greeting().host
    same_host = [bool(host) and welcome.host == host for welcome in welcomes]
    if end.transport == "shm" and not all(same_host):
        raise ClusterError(
            f"--transport=shm: {end.where(same_host.index(False))} is not on this host, or this system has no shared "
            "memory; use --transport=auto or tcp"
        )
    return [same and end.transport != "tcp" for same in same_host]


def create(
    channels: PsChannels,
    message: m.Create,
    flats: Sequence[FlatParameters],
    buffers: CapturedBuffers | None,
    begins: Sequence[LoadedState | None],
) -> bool:
    """The chief hands its variables, or the path of a checkpoint with them, to the ps tasks, shard 0 last.

    Returns:
        Whether they had variables before, which then stay as they are.
    """
    existing, new = False, message.restore is None and not message.only_existing
    for k in reversed(range(len(channels.end.ps))):
        frames: list[Frame] = []
        for flat in flats if new else ():
            for region in (flat.layout.trained[k], flat.layout.constants[k]):
                values = torch.zeros(region.size_bytes, dtype=torch.uint8)
                flat.store(region, section_views(region, values))
                frames.append(tensor_frame(values))
        for flat in flats if new else ():
            frames += flat.tables.frames(k, message.plan.num_shards)
        if k == 0 and message.plan.buffers and not message.only_existing:
            assert buffers is not None
            frames.append(tensor_frame(buffers.pack()))
        for track, (state, flat) in enumerate(zip(begins, flats, strict=False)):
            if state is not None and new:
                ref, memory = state.part(k, flat.layout, flat.parameters)
                frames.append(memory)
                if track == 0:
                    message.optimizer = ref
                else:
                    message.states[track] = ref
        answer = _ask_to_create(channels, k, message, frames)
        existing = existing or answer.existing
    return existing


def _ask_to_create(channels: PsChannels, k: int, message: m.Create, frames: list[Frame]) -> m.Created:
    """Sends a creation to ps task k; what has arrived is not sent again, however long it takes: it is asked whether it is there."""
    what, limit_s = "the variables to be created", channels.end.patience.start_s
    again, asker = (
        msgspec.structs.replace(message, only_existing=True, optimizer=None, states={}),
        channels.asker(k).at_start(),
    )
    while True:
        try:
            return asker.ask(message, frames, kind=m.Created, what=what, limit_s=limit_s, again=again)[0]
        except LostCreationError:
            if message.only_existing:
                raise
            # It is not there: it was lost on its way.


def take_faster_ways(channels: PsChannels, welcomes: Sequence[m.Welcome], shared: Sequence[bool]) -> None:
    """Goes over to the best way that each ps task offers, before anything large is sent."""
    end, greeting = channels.end, codec.encode(channels.end.greeting())
    for k, (ps, welcome) in enumerate(zip(end.ps, welcomes, strict=True)):
        target = Target(
            task=str(ps),
            host=end.cluster.address(ps).rpartition(":")[0],
            local=shared[k],
            greeting=greeting,
            answer_s=end.patience.silence_s,
        )
        asker = channels.asker(k)
        asker.channel = upgrade(asker.channel, welcome.ways, target, say=end.tell, clock=end.clock)
