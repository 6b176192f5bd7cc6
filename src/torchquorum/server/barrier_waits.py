"""Where workers wait for each other on shard 0: the ends of epochs, and barriers.

Owned by the leader. `torchquorum.rules.barriers` says who may go on; here is what follows from that for the quorum. What always holds: a
worker that waits is paused, and all whose wait is over count again at the same moment, so that no round closes without some of them.
"""

from __future__ import annotations

from typing import Any

from torchquorum.errors import ConfigError
from torchquorum.rules.barriers import CALLS, EPOCHS, Barrier
from torchquorum.rules.batch_pool import WorkerLife
from torchquorum.server.decision_effects import DecisionEffects
from torchquorum.wire.messages import AtBarrier, BarrierStatus

SAVED_AS = "~epochs"  # in a checkpoint, beside the shares of data, which have names without ~


class BarrierWaits:
    """The barriers of a run.

    Attributes:
        barriers: Who has come where.
    """

    def __init__(self, effects: DecisionEffects) -> None:
        self._effects, self._quorum, self.barriers = effects, effects.quorum, effects.barriers

    def joined(self, worker: int, incarnation: int) -> None:
        """A worker has joined."""
        self.barriers.joined(WorkerLife(worker, incarnation))

    def gone(self, worker: int, incarnation: int) -> None:
        """A worker's incarnation is over."""
        self.barriers.gone(WorkerLife(worker, incarnation))

    def wait(self, asked: AtBarrier, now: float, wall: float) -> BarrierStatus:
        """A joined worker has come to the end of an epoch or to a barrier, or asks which epoch the run is in.

        Raises:
            ConfigError: Every live worker waits, and not for the same.
        """
        quorum, here, life = self._quorum, self.barriers, WorkerLife(asked.worker, asked.incarnation)
        opened = True
        here.heard(asked.pace)
        if not asked.wait:
            plan = self._effects.plan
            here.enter(life, asked.epoch, quorum.alive if plan.elastic else range(plan.num_workers))
        elif not quorum.stopped:
            at_barrier = asked.barrier > 0
            barrier = Barrier(asked.barrier) if at_barrier else Barrier(asked.epoch, asked.stage)
            if here.come(life, CALLS if at_barrier else EPOCHS, barrier):
                pause = quorum.pause(asked.worker, asked.incarnation, now, done=True)
                self._effects.follow(pause, wall)
                opened = self._open(life, now, wall)
        live = self._lives()
        if not opened and (where := here.stuck(live)):
            raise ConfigError(
                f"every live worker waits, and not for the same: {where}. All workers have to run the same lines"
            )
        progress = sum(worker.local_step for worker in quorum.workers.values())
        steps, missing = here.steps(asked.worker), here.missing(life, live)
        return BarrierStatus(
            asked.request, opened, here.epoch, list(here.members), steps, missing, progress, quorum.stopped, here.pace
        )

    def _open(self, asking: WorkerLife, now: float, wall: float) -> bool:
        """Lets the workers whose wait is over go on, all at once; returns whether the one that asks is among them."""
        quorum, effects, epoch = self._quorum, self._effects, self.barriers.epoch
        over = self.barriers.opened(self._lives())
        if EPOCHS in over.values() and not quorum.live:
            effects.follow(quorum.flush(), wall)  # all have used up what they had
        if self.barriers.epoch != epoch:
            effects.history.wall = wall
            effects.history.note("epoch", values={"epoch": self.barriers.epoch})
        for life in over:
            effects.follow(quorum.resume(life.worker, life.incarnation, now), wall)
        return asking in over

    def _lives(self) -> list[WorkerLife]:
        return [WorkerLife(i, worker.incarnation) for i, worker in sorted(self._quorum.workers.items()) if worker.alive]

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns what a checkpoint of the current version holds of the epochs; empty if there are none."""
        epochs = self.barriers.state()
        return {SAVED_AS: epochs} if epochs else {}
