"""What a ps task answers to the greeting of a reader: what the run is made of, and where its versions lie on this host."""

from __future__ import annotations

import torchquorum.wire.messages as m
from torchquorum.cluster import TaskId
from torchquorum.server.identity import Identity
from torchquorum.server.run import Run


def welcome_reader(me: Identity, hello: m.ReaderHello, run: Run | None) -> m.ReaderWelcome:
    """Returns the answer to a reader's greeting."""
    addresses = [me.cluster.address(TaskId("ps", k)) for k in range(me.cluster.num_tasks("ps"))]
    answer = m.ReaderWelcome(m.PROTOCOL, str(me.task), me.incarnation, addresses, package=m.PACKAGE)
    if run is None:
        return answer
    answer.plan, answer.generation = run.plan, run.generation
    if me.host and hello.host == me.host:
        tracks = run.shard.tracks
        answer.versions = [track.variables.versions.slots.ref for track in tracks]
        answer.pages = [track.page.ref if track.page is not None else None for track in tracks]
    return answer
