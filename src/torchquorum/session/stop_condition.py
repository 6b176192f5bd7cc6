"""When a run is over: at a global step, after a number of steps, or after a time.

Owned by the session, which asks at every step; the chief's last step goes to the ps tasks with the plan, and they keep to it. What
always holds: the last step, where there is one, is known before the variables are created.
"""

from __future__ import annotations

from torchquorum.clock import SYSTEM, Clock
from torchquorum.session.config import StopOptions


class StopCondition:
    """The end of one session's run.

    Attributes:
        last_step: The global step at which the run is over; None trains until the loop ends.
    """

    def __init__(self, options: StopOptions, clock: Clock = SYSTEM) -> None:
        self.last_step, self._num_steps, self._max_seconds = options.last_step, options.num_steps, options.max_seconds
        self._clock, self._started_at = clock, clock.now()

    def start_clock(self) -> None:
        """Counts the seconds from now on."""
        self._started_at = self._clock.now()

    @property
    def is_late(self) -> bool:
        """Whether the run's time is up."""
        return self._max_seconds is not None and self._clock.now() - self._started_at > self._max_seconds

    def count_from(self, version: int) -> None:
        """Turns a number of steps into the last step, once: `version` is where the run begins or continues."""
        if self._num_steps is not None and self.last_step is None:
            self.last_step = self._num_steps + version

    def end_at(self, last_step: int) -> None:
        """Makes this the last step, if the options name none."""
        if self.last_step is None and self._num_steps is None:
            self.last_step = last_step
