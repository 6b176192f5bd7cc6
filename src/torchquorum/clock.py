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


class SeenTime:
    """Time as a loop has seen it: between two of its turns at most `most_s` pass, however long the loop was away.

    A task that was paused (SIGSTOP, a frozen container, a suspended machine) or starved heard nobody meanwhile, whoever spoke, and has
    no right to take anybody for lost. So every loop with a deadline takes its time from here: what it did not see does not count.

    Args:
        clock: Tells the time.
        most_s: More than a turn of the loop takes, and well below its deadlines.

    Attributes:
        most_s: As above; may be changed between two turns.
    """

    def __init__(self, clock: Clock, most_s: float) -> None:
        self._clock, self.most_s = clock, most_s
        self._turned = clock.now(), 0.0  # when the loop last turned, and how much it had not seen by then

    def turn(self) -> float:
        """Returns the time at the beginning of a turn. Called by the thread of the loop."""
        at, unseen_s = self._turned
        now = self._clock.now()
        unseen_s += max(0.0, now - at - self.most_s)
        self._turned = now, unseen_s
        return now - unseen_s

    def now(self) -> float:
        """Returns the time in the midst of a turn. May be called on any thread."""
        at, unseen_s = self._turned
        return min(self._clock.now(), at + self.most_s) - unseen_s
