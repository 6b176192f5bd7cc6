"""The clock as an argument: whatever waits or measures time is given one, so that the whole protocol can run on a virtual clock.

The lowest module but errors; imported by everything that waits. What always holds: `SYSTEM` is the only reader of the machine's
time in the protocol's code; `now` never goes back, `wall` may.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time and lets it pass."""

    def now(self) -> float:
        """Returns seconds that never go back, from an unknown beginning; for deadlines and durations."""
        ...

    def wall(self) -> float:
        """Returns seconds since 1970; for people, ledgers and manifests."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Lets time pass."""
        ...

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Waits until an event is set or time is up; returns whether it is set."""
        ...


class SystemClock:
    """The machine's own clocks."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    sleep = staticmethod(time.sleep)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Waits until an event is set or time is up; returns whether it is set."""
        return event.wait(seconds)


SYSTEM: Clock = SystemClock()
