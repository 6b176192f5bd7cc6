"""What is checked of a creation before anything is made, or given up for it.

Called by the service when the chief creates variables, or has them made anew. What always holds: a creation that is refused
here has cost nothing; the variables that are there stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchquorum.errors import LostCreationError, RefusedError
from torchquorum.formats.checkpoint import Reader, load_manifest
from torchquorum.formats.storage import locate
from torchquorum.server.me import Me
from torchquorum.server.snapshot import check_same_model
from torchquorum.transport.buffers import MODES, Packing
from torchquorum.transport.codec import Frame
from torchquorum.transport.memory import frame_tensor
from torchquorum.transport.messages import Create


def check_creation(me: Me, create: Create, frames: Sequence[Frame]) -> None:
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
    if len(frames) != (expected := (2 if create.restore is None else 0) + buffers):
        raise ValueError(f"{len(frames)} tensor frames, expected {expected}")
    num_ps = me.cluster.num_tasks("ps")
    if plan.num_shards != num_ps or plan.num_workers < 1:
        raise RefusedError(
            f"the chief's cluster has {plan.num_shards} ps tasks and {plan.num_workers} workers, that of "
            f"{me.task} has {num_ps} ps tasks. Give every task the same --ps_hosts and --worker_hosts."
        )
    if plan.durable and plan.logdir is None:
        raise RefusedError("a durable run needs a folder for its journal: give the session a logdir")
    if buffers:
        if plan.buffers_mode not in MODES:
            raise ValueError(f"buffers_mode {plan.buffers_mode!r}: allowed are {', '.join(MODES)}")
        frame_tensor(frames[-1], Packing(plan.buffers).size_bytes)
    if create.restore is None:
        layout = plan.layout()
        for frame, regions in zip(frames, (layout.trained, layout.constants), strict=False):
            frame_tensor(frame, regions[me.index].size_bytes)
        return
    path = locate(create.restore)
    manifest = load_manifest(path)
    with Reader(path, manifest) as reader:
        check_same_model(manifest, reader, plan)
