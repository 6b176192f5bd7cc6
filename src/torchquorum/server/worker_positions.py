"""Where each worker stood in its data, and whose position or buffers a checkpoint still waits for.

Owned by the run's checkpoints. What always holds: with rounds a checkpoint gets every live worker's position at the very version,
without rounds the last one that was given since it began.
"""

from __future__ import annotations

from typing import Any

from torchquorum.rules.quorum import Quorum
from torchquorum.server.buffer_home import BufferHome

REMEMBERED_POSITIONS = 4


class WorkerPositions:
    """The positions of a run's workers.

    Args:
        quorum: Who is alive.
        buffers: The model's buffers, if it has any: a worker's come with its position.
        restored: Each worker's position in the checkpoint that the run goes on from.
    """

    def __init__(self, quorum: Quorum, buffers: BufferHome | None, restored: dict[str, dict[str, Any]]) -> None:
        self._quorum, self._buffers, self._restored = quorum, buffers, restored
        self._exact = any(track.rule.once_per_round for track in quorum.tracks)
        self._given: dict[int, dict[int, dict[str, Any]]] = {}
        self._unfinished: dict[int, int] = {}  # of each worker, the version whose position is not final
        self._since: tuple[set[int], set[int]] = (
            set(),
            set(),
        )  # whose position, whose buffers came since the last `begin`

    def begin(self) -> None:
        """A checkpoint begins."""
        self._since = set(), set()

    def note(self, worker: int, version: int, body: dict[str, Any], *, final: bool) -> None:
        """Notes where a worker stood when it first held a version; unless `final`, its schedulers are still to come."""
        known = self._given.setdefault(worker, {})
        known[version] = {**body, "version": version}
        self._unfinished[worker] = -1 if final else version
        self._since[0].add(worker)
        while len(known) > REMEMBERED_POSITIONS:
            del known[min(known)]

    def buffers_received(self, worker: int) -> None:
        """Notes that a worker has sent its buffers."""
        self._since[1].add(worker)

    def restored(self, worker: int) -> dict[str, Any] | None:
        """Returns a worker's position in the checkpoint that the run goes on from."""
        return self._restored.get(str(worker))

    def is_missing(self, worker: int, version: int) -> bool:
        """Whether a worker's position, or its buffers, are still to come for a checkpoint of this version."""
        # Without rounds the last one will do once the run is over: the worker gave it before it began to wait for this checkpoint.
        over, known, buffers = self._quorum.stopped, self._given.get(worker, {}), self._buffers
        if version not in known and (self._exact or not (worker in self._since[0] or (over and known))):
            return True
        if self._unfinished.get(worker) == version:
            return True
        if buffers is None or buffers.has(worker, version):
            return False
        return self._exact or not (worker in self._since[1] or (over and buffers.knows(worker)))

    def somebody_is_missing(self, version: int) -> bool:
        """Whether one of a live worker is still to come; one that has nothing to compute cannot be asked, and has not moved."""
        workers = self._quorum.workers
        return any(not workers[w].paused and self.is_missing(w, version) for w in self._quorum.alive)

    def at(self, version: int, num_workers: int) -> dict[str, dict[str, Any]]:
        """Returns the positions that a checkpoint of this version gets, by worker."""
        found: dict[str, dict[str, Any]] = {}
        for worker in range(num_workers):
            known = self._given.get(worker, {})
            if version in known:
                found[str(worker)] = known[version]
            elif known and (not self._exact or self._is_done(worker)):
                found[str(worker)] = known[max(known)]
        return found

    def _is_done(self, worker: int) -> bool:
        """Whether a worker is at the end of its epoch, and has not moved since it sent its position there."""
        return worker in self._quorum.workers and self._quorum.workers[worker].done
