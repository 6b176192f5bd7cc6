"""How the chief's Create becomes a run: what is checked before anything is made or discarded for it, then the run itself.

Called by the service. What always holds: a creation that `check_creation` refuses has cost nothing, and variables that are
there stay; one that fails later leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchquorum.errors import LostCreationError, RefusedError
from torchquorum.formats.checkpoint import CheckpointReader, load_manifest
from torchquorum.formats.storage import locate
from torchquorum.server.buffer_home import BufferHome
from torchquorum.server.following import Following
from torchquorum.server.given_state import GivenState
from torchquorum.server.identity import Identity
from torchquorum.server.journaling import take_up_journal
from torchquorum.server.leading import Leading
from torchquorum.server.recorder import describe_beginning
from torchquorum.server.shard import Shard, states_of, value_frames
from torchquorum.server.snapshot import check_same_model
from torchquorum.server.task_life import TaskLife
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor
from torchquorum.wire.messages import Create
from torchquorum.wire.packing import MODES, Packing


def check_creation(me: Identity, create: Create, frames: Sequence[Frame]) -> None:
    """Checks that a shard can be made as the chief asks.

    Raises:
        LostCreationError: The chief wants to go on with variables that are not here any more.
        RefusedError: The chief has another cluster, or its run cannot be durable.
        CheckpointError: What is to be restored is not there, or holds another model.
        ValueError: The message makes no sense.
    """
    if create.only_existing:
        raise LostCreationError("it was restarted, and its variables are not here any more")
    plan = create.plan
    buffers = me.index == 0 and bool(plan.buffers)
    plans, states = plan.tracks(), states_of(create)
    values = value_frames(plan) if create.restore is None else 0
    if len(frames) != (expected := values + buffers + len(states)):
        raise ValueError(f"{len(frames)} tensor frames, expected {expected}")
    num_ps = me.cluster.num_tasks("ps")
    if plan.num_shards != num_ps or plan.num_workers < 1:
        raise RefusedError(
            f"the chief's cluster has {plan.num_shards} ps tasks and {plan.num_workers} workers, that of "
            f"{me.task} has {num_ps} ps tasks. Give every task the same --ps_hosts and --worker_hosts."
        )
    if not all(0 <= track < len(plans) for track in states):
        raise ValueError(f"state of optimizers {list(states)[:8]}, the run has {len(plans)}")
    if plan.durable and plan.logdir is None:
        raise RefusedError("a durable run needs a folder for its journal: give the session a logdir")
    if buffers:
        if plan.buffers_mode not in MODES:
            raise ValueError(f"buffers_mode {plan.buffers_mode!r}: allowed are {', '.join(MODES)}")
        frame_tensor(_buffers_of(create, frames), Packing(plan.buffers).size_bytes)
    if create.restore is None:
        layouts = [of.layout() for of in plans]
        regions = [of[me.index] for layout in layouts for of in (layout.trained, layout.constants)]
        for frame, region in zip(frames, regions, strict=False):
            frame_tensor(frame, region.size_bytes)
        for (track, ref), frame in zip(states.items(), frames[len(frames) - len(states) :], strict=True):
            of, region = plans[track], layouts[track].trained[me.index]
            GivenState(ref, frame, region, of.variables, of.optimizer.name)
        return
    path = locate(create.restore)
    manifest = load_manifest(path)
    with CheckpointReader(path, manifest) as reader:
        check_same_model(manifest, reader, plan)


def _buffers_of(create: Create, frames: Sequence[Frame]) -> Frame:
    """Returns the frame with the model's buffers, which comes after the values, if they are there."""
    return frames[value_frames(create.plan) if create.restore is None else 0]


def create_run(life: TaskLife, create: Create, frames: Sequence[Frame], now: float, wall: float) -> Leading | Following:
    """Makes a run as the chief asks: from its values, or from a checkpoint and the journal after it.

    Raises:
        RefusedError: The journal does not lead where the chief says.
        CheckpointError: The checkpoint cannot be read.
    """
    plan, index, manifest = create.plan, life.me.index, None
    if create.restore is None:
        shard = Shard.created(index, create, frames)
    else:
        shard, manifest = Shard.restored(index, plan, locate(create.restore), create.generation)
    run: Leading | Following | None = None
    try:
        replayed = take_up_journal(shard, create, life.announce)
        if index > 0:
            return Following(life, shard)
        buffers = None
        if plan.buffers:
            buffers = BufferHome.opened(
                plan, _buffers_of(create, frames), create.restore, shard.workers.peer_of, life.announce
            )
        positions, data = (manifest.workers, manifest.data) if manifest is not None else ({}, {})
        run = Leading(life, shard, buffers, positions)
        if run.recorder is not None:
            base = (
                -1 if manifest is None else create.journal.after if create.journal is not None else manifest.generation
            )
            kept = create.journal.kept if create.journal is not None else []
            run.recorder.began(describe_beginning(shard, base, frames, wall, kept))
        run.checkpoints.newest.path = create.restore or ""
        run.requests.kept = create.journal.kept if create.journal is not None else []
        step = manifest.step if manifest is not None else 0
        run.begin(data, replayed, now, wall, step=step, save=bool(plan.durable) and manifest is None)
        return run
    except BaseException:
        (run or shard).close()
        raise
