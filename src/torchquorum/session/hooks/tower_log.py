"""`tq.hooks.TowerLogHook`: the log line of the tutorials' multi-GPU program.

Given to `tq.Session(hooks=[...])` of a worker that computes with `tq.Towers`; called on the thread of the training loop.
"""

from __future__ import annotations

import math
from datetime import datetime

from torchquorum.errors import ConfigError
from torchquorum.lines import write_line
from torchquorum.session.hooks.hook import Hook, HookSession, Ran
from torchquorum.session.hooks.standard import check_every
from torchquorum.towers.towers import Towers

FORMAT = "%s: step %d, loss = %.2f (%.1f examples/sec; %.3f sec/batch)"


class TowerLogHook(Hook):
    """Prints the tutorials' line about a step of all towers; it needs `optimizer.step(loss=loss)`.

    The step is the global step; its time is counted from the end of the step before and includes data, towers, push and
    pull. As in the tutorials, examples/sec counts those of all towers of this worker, and sec/batch is the time of the
    step divided by the number of towers.

    Args:
        towers: The towers of this worker's loop.
        every: Global steps between two lines.
        batch_size: Examples in one tower's batch, where `towers` cannot tell from the batches.
    """

    def __init__(self, towers: Towers, every: int = 10, *, batch_size: int | None = None) -> None:
        check_every(every)
        if not isinstance(towers, Towers):
            raise ConfigError(f"TowerLogHook({type(towers).__name__}): give it the tq.Towers of the loop")
        self._towers, self._every, self._batch_size = towers, every, batch_size
        self._next, self._since = 0, 0.0

    def after_create_session(self, session: HookSession) -> None:
        """Finds the next step to log; after a recovery, again."""
        self._next = (session.global_step // self._every + 1) * self._every
        self._since = session.task.clock.now()

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """Prints a line if one is due."""
        duration = max(session.task.clock.now() - self._since, 1e-9)
        if ran.step.version >= self._next:
            self._next = (ran.step.version // self._every + 1) * self._every
            number = len(self._towers)
            examples = self._towers.examples
            if examples is None:
                examples = self._batch_size * number if self._batch_size is not None else math.nan
            loss = math.nan if ran.loss is None else ran.loss
            values = (datetime.now(), ran.step.version, loss, examples / duration, duration / number)
            write_line(FORMAT % values)
        self._since = session.task.clock.now()
