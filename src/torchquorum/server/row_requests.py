"""What workers have asked one shard for of its tables: kept until the log says at which place it is answered.

Owned by the shard. What always holds: a worker has one such request at a time, and a newer one takes the place of an older one; one
that was answered is answered again with the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchquorum.server.reply import Reply
from torchquorum.server.shard_tables import ShardTables
from torchquorum.wire.channel import Peer
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import tensor_frame
from torchquorum.wire.messages import PullRows, Rows, RowsOut


@dataclass(slots=True)
class RowRequest:
    """A worker's request for rows, with its answer once there is one."""

    peer: Peer
    asked: PullRows
    keys: Frame
    tables: ShardTables
    answer: tuple[Rows, Frame] | None = None

    def reply(self) -> list[Reply]:
        """Returns the answer, if there is one."""
        return [Reply(self.peer, self.answer[0], [self.answer[1]])] if self.answer is not None else []


class RowRequests:
    """The newest request of each worker."""

    def __init__(self) -> None:
        self._newest: dict[int, RowRequest] = {}

    def ask(self, peer: Peer, asked: PullRows, keys: Frame, tables: ShardTables) -> list[Reply]:
        """Keeps a request; returns its answer if it has been answered before."""
        known = self._newest.get(asked.worker)
        if known is not None and (known.asked.incarnation, known.asked.request) == (asked.incarnation, asked.request):
            known.peer = peer
            return known.reply()
        tables.check(asked.table, keys)
        self._newest[asked.worker] = RowRequest(peer, asked, bytes(keys), tables)
        return []

    def answer(self, entry: RowsOut, versions: Sequence[int]) -> list[Reply]:
        """The log says that a request is answered now, at these versions of the optimizers."""
        known = self._newest.get(entry.worker)
        if known is None or (known.asked.incarnation, known.asked.request) != (entry.incarnation, entry.request):
            return []
        rows = known.tables.gather(known.asked.table, known.keys)
        known.answer = (
            Rows(entry.request, versions[known.asked.track]),
            tensor_frame(rows.reshape(-1).view(torch.uint8)),
        )
        return known.reply()


@dataclass(slots=True)
class AskedRows:
    """On shard 0: which shards know what each worker's newest request for rows asks them for."""

    num_shards: int
    _open: dict[int, tuple[int, int, set[int]]] = field(default_factory=dict)

    def add(self, shard: int, worker: int, incarnation: int, request: int) -> RowsOut | None:
        """A shard knows it; returns the entry of the log once all do."""
        known = self._open.get(worker)
        if known is None or known[:2] != (incarnation, request):
            if known is not None and known[0] == incarnation and request < known[1]:
                return None
            known = self._open[worker] = (incarnation, request, set())
        if len(known[2]) == self.num_shards:
            return None  # it has been answered
        known[2].add(shard)
        return RowsOut(worker, incarnation, request) if len(known[2]) == self.num_shards else None
