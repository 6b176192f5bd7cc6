"""When the job is over, and whether it ended well: all workers have left, or none ever came.

Owned by ps task 0 over all its runs, each of which reports the workers that leave. What always holds: workers that never came
are waited for a moment, dead ones longer; a run whose last version nobody has saved is saved before it ends; a failure that was
made good is forgiven.
"""

from __future__ import annotations

from torchquorum.rules.quorum import Worker
from torchquorum.server.checkpoints import Checkpoints
from torchquorum.server.leader import Leader

LATE_S = 10.0
IDLE_S = 600.0
HURRIED_S = 10.0


class Ending:
    """Looks whether the job is over.

    Attributes:
        lost: What was lost for good, in words; empty if nothing was.
        hurried_at: When a signal has asked this task to end: workers that do not leave a run that is stopped are waited for `HURRIED_S`.
    """

    def __init__(self) -> None:
        self.lost = ""
        self.hurried_at: float | None = None
        self._failed: dict[int, str] = {}  # workers whose last incarnation failed, and why
        self._idle_since: float | None = None

    def left(self, worker: int, *, failed: str) -> None:
        """A worker has left: its part is done, or its program failed. One that failed before and is done now is forgiven."""
        if failed:
            self._failed[worker] = failed
        else:
            self._failed.pop(worker, None)

    @property
    def why(self) -> str:
        """Returns why the job has not ended well; empty if it has."""
        failed = (
            f"/job:worker/task:{i} failed and did not come back ({why})" for i, why in sorted(self._failed.items())
        )
        return "; ".join(filter(None, (self.lost, *failed)))

    def check(self, leader: Leader, checkpoints: Checkpoints | None, now: float, *, comes_back: bool = True) -> None:
        """Ends the log of a job that is over.

        Args:
            leader: What is known of the workers.
            checkpoints: Saves what is not saved.
            now: The time.
            comes_back: Whether a worker that has left by an error may be started again.
        """
        workers = leader.quorum.workers
        if not workers and not self.lost:
            return
        hurried = self.hurried_at is not None and leader.quorum.stopped and now - self.hurried_at > HURRIED_S
        if not hurried and (
            leader.quorum.live > 0 or leader.quorum.alive
        ):  # one that has nothing to compute is present
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        idle_s = now - self._idle_since
        expected = leader.plan.min_workers if leader.plan.elastic else leader.plan.num_workers
        missing = [i for i in range(expected) if i not in workers]
        gone = [i for i, w in workers.items() if w.gone]
        waited_for = missing if leader.quorum.stopped else missing + gone
        over = leader.quorum.stopped or leader.data.over or _is_done(workers)
        nobody_comes = not waited_for or not (comes_back or any(not worker.left for worker in workers.values()))
        if over and (hurried or nobody_comes or idle_s > LATE_S):
            if checkpoints is not None and not self.lost:
                checkpoints.save_unasked(now)  # the chief is gone, or was done before the others
            if checkpoints is not None and checkpoints.busy:
                return  # one that was asked for while another was made still waits for its turn
            if checkpoints is not None and leader.plan.must_save:
                self.lost = self.lost or checkpoints.lost
            leader.end(ok=not self.why, why=self.why or "the run is over")
        elif not over and idle_s > IDLE_S:
            names = ", ".join(f"/job:worker/task:{i}" for i in [*missing, *gone]) or "all workers"
            leader.end(ok=False, why=f"no worker has been alive for {idle_s:.0f} s; gone or never started: {names}")


def _is_done(workers: dict[int, Worker]) -> bool:
    """Whether a run without a last step is over: the chief is done, or it failed and nobody else may still come back."""
    chief = workers.get(0)
    if chief is None or not chief.left:
        return False
    return not chief.failed or all(worker.left for worker in workers.values())
