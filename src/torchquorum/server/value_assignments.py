"""Which assignments were made, and which workers wait for one: `session.assign()`, which all workers call at the same place.

Owned by `assigning`. The chief's values count, or, while it is dead or gone, those of the first worker alive. Workers count their own
calls: the nth waits until n assignments have been made. What always holds: a worker that waits is released by an assignment, by the end
of the run, or to give its own values; an assignment that is asked for twice is made once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchquorum.rules.quorum import Quorum
from torchquorum.wire.messages import Assign


@dataclass(slots=True)
class ValueAssignments:
    """The assignments of one run.

    Attributes:
        made: How many were made.
        waiting: The workers that wait, each with what it asked.
    """

    made: int = 0
    waiting: dict[int, Assign] = field(default_factory=dict)
    _last: tuple[int, int, int] = (-1, 0, 0)  # the worker, incarnation and number of the last one

    def assigner(self, quorum: Quorum) -> int:
        """Returns the worker whose values count: the chief, unless it is dead or gone and another is alive."""
        chief, alive = quorum.workers.get(0), quorum.alive
        return 0 if chief is None or chief.alive or not alive else min(alive)

    def is_due(self, assign: Assign, quorum: Quorum) -> bool:
        """Whether this worker's values are to be assigned now; not those of one that stands in and comes to what was assigned already."""
        again = (assign.worker, assign.incarnation, assign.number) == self._last
        late = assign.worker != 0 and assign.number <= self.made  # the chief counts anew when it was started again
        return assign.has_values and not again and not late and assign.worker == self.assigner(quorum)

    def make(self, assign: Assign) -> None:
        """An assignment is made."""
        self.made += 1
        self._last = assign.worker, assign.incarnation, assign.number

    def wait(self, assign: Assign) -> None:
        """A worker has come to an assignment, and waits."""
        self.waiting[assign.worker] = assign

    def forget(self, worker: int) -> None:
        """A worker has gone, or come back as another process: what it asked does not count."""
        self.waiting.pop(worker, None)

    def over(self, *, stopped: bool) -> list[Assign]:
        """Returns those whose wait is over, and forgets them."""
        done = [
            assign
            for assign in self.waiting.values()
            if stopped or assign.number <= self.made or (assign.worker, assign.incarnation, assign.number) == self._last
        ]
        for assign in done:
            del self.waiting[assign.worker]
        return done

    def stand_in(self, quorum: Quorum) -> Assign | None:
        """Returns, and forgets, a worker that waits without having given its values, and whose values count."""
        waits = self.waiting.get(self.assigner(quorum))
        return self.waiting.pop(waits.worker) if waits is not None and not waits.has_values else None
