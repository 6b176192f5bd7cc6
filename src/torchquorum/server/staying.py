"""The workers' programs that go on after a session, and may begin another one: the ps tasks stay for them.

Owned by the service. What always holds: a program that has said nothing for a while is taken to have ended.
"""

from __future__ import annotations

import torchquorum.wire.messages as m

STAY_S = 10.0


class Staying:
    """When each worker between two sessions was last heard of."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._heard: dict[int, float] = {}

    def hear(self, stay: m.Stay, now: float) -> None:
        """A worker's program goes on after its session, or has ended."""
        if stay.gone:
            self.gone(stay.worker)
        elif 0 <= stay.worker < self._num_workers:
            self._heard[stay.worker] = now

    def gone(self, worker: int) -> None:
        """A worker's process has ended."""
        self._heard.pop(worker, None)

    def somebody(self, now: float) -> bool:
        """Whether a worker's program goes on that may begin another session."""
        return any(now - heard_at <= STAY_S for heard_at in self._heard.values())
