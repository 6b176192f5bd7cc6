"""The workers that have joined a shard: which incarnation, where its answers go, where its gradients lie.

Owned by the shard. What always holds: of each worker one incarnation is in; an earlier one stays refused as long as it is
remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchquorum.memory.shared_pool import PoolOfOther
from torchquorum.memory.slots import Slots
from torchquorum.placement.layout import Region
from torchquorum.rules.quorum import remembered_lives
from torchquorum.wire.channel import Peer
from torchquorum.wire.messages import Join, MemoryRef, TrackMemory


@dataclass(slots=True)
class JoinedWorker:
    """A worker that has joined.

    Attributes:
        incarnation: Which of its processes.
        peer: Where its last request came from.
        memory: Its gradient slots, for each optimizer; none if it sends frames.
        join_request: The request by which it joined.
        newest: Its latest request: an older one that comes now was late or doubled on its way.
        gradients: What names its gradient memory to others, for each optimizer.
        fastpath: On which optimizers' fast path it can be.
        rows: Its memory for rows of tables, for each optimizer; none where they travel in frames.
        revisions: Which of each optimizer's settings it knows, as it last said.
        moved_bytes: How many bytes had come from that peer or reached it at the last look.
    """

    incarnation: int
    peer: Peer
    memory: list[Slots]
    join_request: int
    newest: int
    gradients: list[MemoryRef]
    fastpath: frozenset[int]
    revisions: list[int]
    rows: list[PoolOfOther | None] = field(default_factory=list)
    moved_bytes: int = 0


class WorkerTable:
    """The joined workers by index, and the incarnations that they replaced.

    Attributes:
        moved_bytes: How many bytes have come from all of them, or reached them, at the last look.
    """

    def __init__(self, num_workers: int, regions: Sequence[Region]) -> None:
        self._regions = regions
        self.moved_bytes = 0
        self._joined: dict[int, JoinedWorker] = {}
        self._replaced: dict[tuple[int, int], None] = {}
        self._most_replaced = remembered_lives(num_workers)

    def admit(self, peer: Peer, join: Join) -> list[tuple[int, int]]:
        """Notes a worker that joins and opens its gradient memory.

        Returns:
            The (worker, incarnation) pairs that are not remembered any more.

        Raises:
            SegmentError: Its memory cannot be opened.
            ValueError: It has not memory for each optimizer.
        """
        tracks = [TrackMemory(join.gradients, join.fastpath), *join.more]
        if join.gradients is not None and len(tracks) != len(self._regions):
            raise ValueError(f"memory for the gradients of {len(tracks)} optimizers, the run has {len(self._regions)}")
        refs = [track.gradients for track in tracks if track.gradients is not None]
        memory = [Slots.open(ref, region) for ref, region in zip(refs, self._regions, strict=False)]
        before = self._joined.get(join.worker)
        forgotten = []
        if before is not None and before.incarnation != join.incarnation:
            self._replaced[join.worker, before.incarnation] = None
            while len(self._replaced) > self._most_replaced:
                forgotten.append(next(iter(self._replaced)))
                del self._replaced[forgotten[-1]]
        self._joined[join.worker] = JoinedWorker(
            incarnation=join.incarnation,
            peer=peer,
            memory=memory,
            join_request=join.request,
            newest=join.request,
            gradients=refs,
            fastpath=frozenset(k for k, track in enumerate(tracks) if track.fastpath and memory),
            revisions=[-1] * len(self._regions),
            rows=[PoolOfOther(ref) if ref is not None else None for ref in join.rows],
        )
        return forgotten

    def get(self, worker: int) -> JoinedWorker | None:
        """Returns a worker, if it has joined."""
        return self._joined.get(worker)

    def __getitem__(self, worker: int) -> JoinedWorker:
        return self._joined[worker]

    def knows(self, worker: int, incarnation: int) -> bool:
        """Whether this incarnation of a worker has joined here."""
        joined = self._joined.get(worker)
        return joined is not None and joined.incarnation == incarnation

    def replaced(self, worker: int, incarnation: int) -> bool:
        """Whether this incarnation of a worker was here and a newer one has taken its place."""
        return (worker, incarnation) in self._replaced

    @property
    def num_replaced(self) -> int:
        """Returns how many replaced incarnations are remembered."""
        return len(self._replaced)

    def joined_by(self, join: Join) -> bool:
        """Whether this very join has been noted; a worker may join again with other memory."""
        joined = self._joined.get(join.worker)
        return joined is not None and (joined.incarnation, joined.join_request) == (join.incarnation, join.request)

    def is_join(self, worker: int, request: int) -> bool:
        """Whether a request is the one by which the worker joined."""
        joined = self._joined.get(worker)
        return joined is not None and joined.join_request == request

    def is_current(self, worker: int, peer: Peer, request: int) -> bool:
        """Notes where a joined worker's request came from: its answers go there.

        Returns:
            False if the request is older than its newest: the worker has its answer and has gone on.
        """
        joined = self._joined[worker]
        if request < joined.newest:
            return False
        joined.peer, joined.newest = peer, request
        return True

    def heard_from(self, moved_bytes: Callable[[Peer], int]) -> list[tuple[int, int]]:
        """Returns the (worker, incarnation) pairs from which bytes have come or which some have reached since the last look."""
        heard = []
        for worker, joined in self._joined.items():
            count = moved_bytes(joined.peer)
            if count != joined.moved_bytes:
                # A connection that was made anew counts from the beginning.
                self.moved_bytes += count - joined.moved_bytes if count > joined.moved_bytes else count
                joined.moved_bytes = count
                heard.append((worker, joined.incarnation))
        return heard

    def peer_of(self, worker: int) -> Peer | None:
        """Returns where a worker's last request came from."""
        joined = self._joined.get(worker)
        return joined.peer if joined is not None else None


class TrackWorkers:
    """The joined workers as one optimizer's part of the shard sees them."""

    def __init__(self, table: WorkerTable, track: int) -> None:
        self._table, self.track = table, track

    def get(self, worker: int) -> JoinedWorker | None:
        """Returns a worker, if it has joined."""
        return self._table.get(worker)

    def knows(self, worker: int, incarnation: int) -> bool:
        """Whether this incarnation of a worker has joined here."""
        return self._table.knows(worker, incarnation)

    def memory_of(self, worker: int) -> Slots | None:
        """Returns a joined worker's slots for this optimizer's gradients, if it shares memory."""
        memory = self._table[worker].memory
        return memory[self.track] if memory else None

    def rows_of(self, worker: int) -> PoolOfOther | None:
        """Returns a joined worker's memory for rows of this optimizer's tables, if it has one."""
        rows = self._table[worker].rows
        return rows[self.track] if self.track < len(rows) else None

    def on_fastpath(self, worker: int, incarnation: int) -> bool:
        """Whether a worker shares memory with this ps and knows how to use the fast path."""
        joined = self._table.get(worker)
        return joined is not None and joined.incarnation == incarnation and self.track in joined.fastpath

    def gradients_of(self, worker: int) -> MemoryRef | None:
        """Returns where a joined worker's gradients lie."""
        refs = self._table[worker].gradients
        return refs[self.track] if refs else None
