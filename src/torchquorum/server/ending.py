"""When the job is over: all workers have left, or none ever came.

Owned by ps task 0 over all its runs, each of which reports the workers that leave. What always holds: workers that never came
are waited for a moment, dead ones longer; a run whose chief is gone, or was done before the others, is saved before it ends.
"""

from __future__ import annotations

from torchquorum.server.checkpoints import Checkpoints
from torchquorum.server.leader import Leader

LATE_S = 10.0
IDLE_S = 600.0


class Ending:
    """Looks whether the job is over.

    Attributes:
        failed: Whether a worker failed, or something was lost for good.
        chief_finished: Whether the chief has left because it was done.
    """

    def __init__(self) -> None:
        self.failed = self.chief_finished = False
        self._idle_since: float | None = None

    def left(self, worker: int, *, finished: bool) -> None:
        """A worker has left for good."""
        self.failed |= not finished
        if worker == 0:
            self.chief_finished = finished

    def check(self, leader: Leader, checkpoints: Checkpoints | None, now: float) -> None:
        """Ends the log of a job that is over."""
        workers = leader.quorum.workers
        if not workers:
            return
        if leader.quorum.live > 0 or leader.quorum.alive:  # a worker that has nothing to compute counts as present
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        idle_s = now - self._idle_since
        over = leader.quorum.stopped or (0 in workers and workers[0].left) or leader.data.over
        expected = leader.plan.min_workers if leader.plan.elastic else leader.plan.num_workers
        missing = [i for i in range(expected) if i not in workers]
        dead = [i for i, w in workers.items() if not w.left]
        waited_for = missing if leader.quorum.stopped else missing + dead
        if over and (not waited_for or idle_s > LATE_S):
            alone = 0 in dead or self.chief_finished
            if alone and checkpoints is not None:
                checkpoints.save_unasked(now)  # the chief died, or was done before the others
            if checkpoints is not None and checkpoints.busy:
                return  # one that was asked for while another was made still waits for its turn
            leader.end(ok=not self.failed, why="the run is over" if not self.failed else "a worker failed")
        elif not over and idle_s > IDLE_S:
            names = ", ".join(f"/job:worker/task:{i}" for i in [*missing, *dead]) or "all workers"
            leader.end(ok=False, why=f"no worker has been alive for {idle_s:.0f} s; gone or never started: {names}")
