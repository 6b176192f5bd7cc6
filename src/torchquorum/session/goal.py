"""When a run is over: at a global step, so many steps on, or after a time.

Owned by the session, which asks at every step; the chief's goal goes to the ps tasks with the plan, and they keep to it. What
always holds: the last step is known, where there is one, before the variables are made.
"""

from __future__ import annotations

import time

from torchquorum.errors import ConfigError


class Goal:
    """What a session's run goes on to.

    Attributes:
        last_step: The global step at which the run is over; None trains until the loop ends.
    """

    def __init__(self, last_step: int | None, num_steps: int | None, max_seconds: float | None) -> None:
        for name, value in (("last_step", last_step), ("num_steps", num_steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"{name}={value!r}: must be a whole number, 1 or more; leave it out to train until the loop ends"
                )
        if last_step is not None and num_steps is not None:
            raise ConfigError(f"last_step={last_step} and num_steps={num_steps}: give one of the two")
        if max_seconds is not None and max_seconds <= 0:
            raise ConfigError(f"max_seconds={max_seconds}: must be more than 0; leave it out for no limit")
        self.last_step, self._num_steps, self._max_seconds = last_step, num_steps, max_seconds
        self._began_at = time.monotonic()

    def start_clock(self) -> None:
        """Counts the seconds from now on."""
        self._began_at = time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether the run's time is up."""
        return self._max_seconds is not None and time.monotonic() - self._began_at > self._max_seconds

    def count_from(self, version: int) -> None:
        """Turns a number of steps into the last one, once: `version` is what the run begins or goes on at."""
        if self._num_steps is not None and self.last_step is None:
            self.last_step = self._num_steps + version

    def end_at(self, last_step: int) -> None:
        """Makes this the last step, if none was given."""
        if self.last_step is None and self._num_steps is None:
            self.last_step = last_step
