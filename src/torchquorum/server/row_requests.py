"""What workers have asked one shard for of its tables: kept until the log says at which place it is answered.

Owned by the shard. What always holds: of each worker the newest request is here, and of each table the two newest ones for rows ahead of
time; one that was answered is answered again with the same rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from torchquorum.memory.shared_pool import PoolOfOther, rows_behind
from torchquorum.server.reply import Reply
from torchquorum.server.shard_tables import ShardTables
from torchquorum.wire.channel import Peer
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import flat_bytes, pack_parts, tensor_frame
from torchquorum.wire.key_frames import unpack_keys
from torchquorum.wire.messages import PullRows, Rows, RowsOut

AHEAD = 2  # requests of one table: for the batch that is about to be computed, and the one after
KNOWN = 256  # requests of one worker that shard 0 remembers


@dataclass(slots=True)
class RowRequest:
    """A worker's request for rows, with its answer once there is one."""

    peer: Peer
    asked: PullRows
    keys: Frame
    tables: ShardTables
    room: torch.Tensor | None = None  # in the worker's memory, where it wants the rows
    answer: tuple[Rows, list[Frame]] | None = None
    evicted: int = 0  # rows of the table, when it was answered

    def reply(self) -> list[Reply]:
        """Returns the answer, if there is one."""
        return [Reply(self.peer, self.answer[0], self.answer[1])] if self.answer is not None else []

    def is_of(self, incarnation: int, request: int) -> bool:
        """Whether it is this request."""
        return (self.asked.incarnation, self.asked.request) == (incarnation, request)


@dataclass(slots=True)
class OfWorker:
    """The requests of one worker."""

    newest: RowRequest | None = None
    ahead: dict[tuple[int, int], deque[RowRequest]] = field(default_factory=dict)

    def every(self) -> Iterator[RowRequest]:
        """Yields all of them, the newest first."""
        if self.newest is not None:
            yield self.newest
        for requests in self.ahead.values():
            yield from reversed(requests)


class RowRequests:
    """The requests of all workers."""

    def __init__(self) -> None:
        self._of: dict[int, OfWorker] = {}

    def ask(
        self, peer: Peer, asked: PullRows, keys: Frame, tables: ShardTables, memory: PoolOfOther | None = None
    ) -> list[Reply]:
        """Keeps a request; returns its answer if it has been answered before.

        Args:
            peer: Whose it is.
            asked: The request.
            keys: Its keys, unless they are in the worker's memory.
            tables: The tables that it is about.
            memory: The worker's memory for rows.

        Raises:
            ValueError: There is no such table, or it has no such keys.
        """
        own = self._of.setdefault(asked.worker, OfWorker())
        known = next((each for each in own.every() if each.is_of(asked.incarnation, asked.request)), None)
        if known is not None:
            known.peer = peer
            return known.reply()
        room = None
        if asked.at >= 0:
            if memory is None:
                raise ValueError(f"worker {asked.worker} has no memory for rows here")
            keys = tensor_frame(memory.bytes(asked.at, 8 * asked.count))
            room = memory.bytes(*rows_behind(asked.at, asked.count, tables.row_bytes(asked.table)))
        elif asked.since < 0:
            keys = unpack_keys(keys, asked.count).tobytes()
        tables.check(asked.table, keys := bytes(keys))
        request = RowRequest(peer, asked, keys, tables, room)
        if asked.ahead:
            own.ahead.setdefault((asked.track, asked.table), deque(maxlen=AHEAD)).append(request)
        else:
            own.newest = request
        return []

    def keys_of(self, asked: PullRows) -> Frame:
        """Returns the keys of a request that is kept; none of what has changed of another."""
        own = self._of.get(asked.worker, OfWorker())
        return next((each.keys for each in own.every() if each.is_of(asked.incarnation, asked.request)), b"")

    def answer(self, entry: RowsOut, versions: Sequence[int]) -> list[Reply]:
        """The log says that a request is answered now, at these versions of the optimizers."""
        own = self._of.get(entry.worker, OfWorker())
        known = next((each for each in own.every() if each.is_of(entry.incarnation, entry.request)), None)
        if known is None:
            return []
        asked, version = known.asked, versions[known.asked.track]
        known.evicted = known.tables.tables[asked.table].age.evicted
        if asked.since >= 0:
            known.answer = self._changed(known, own, version)
        else:
            rows = known.tables.gather(asked.table, known.keys, known.room)
            frames: list[Frame] = [] if known.room is not None else [tensor_frame(flat_bytes(rows))]
            known.answer = Rows(entry.request, version), frames
        return known.reply()

    def _changed(self, known: RowRequest, own: OfWorker, version: int) -> tuple[Rows, list[Frame]]:
        """Returns what has changed of the rows that a request ahead of time was answered with."""
        asked = known.asked
        of_table = own.ahead.get((asked.track, asked.table), ())
        before = next((each for each in of_table if each.is_of(asked.incarnation, asked.since)), None)
        if before is None or before.answer is None:
            return Rows(asked.request, -1), [b""]
        places, rows = known.tables.changed(asked.table, before.keys, before.answer[0].version, before.evicted)
        return Rows(asked.request, version, len(places)), [pack_parts([torch.from_numpy(places), rows])]


@dataclass(slots=True)
class AskedRows:
    """On shard 0: which shards know what each worker's newest requests for rows ask them for."""

    num_shards: int
    _open: dict[int, tuple[int, dict[int, set[int]]]] = field(default_factory=dict)

    def add(self, shard: int, worker: int, incarnation: int, request: int) -> RowsOut | None:
        """A shard knows it; returns the entry of the log once all do."""
        known = self._open.get(worker)
        if known is None or known[0] != incarnation:
            known = self._open[worker] = (incarnation, {})
        requests = known[1]
        if request not in requests and len(requests) >= KNOWN:
            if request < min(requests):
                return None
            del requests[min(requests)]
        shards = requests.setdefault(request, set())
        if len(shards) == self.num_shards:
            return None  # it has been answered
        shards.add(shard)
        return RowsOut(worker, incarnation, request) if len(shards) == self.num_shards else None
