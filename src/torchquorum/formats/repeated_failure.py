"""Something that fails again and again while a run goes on: said at once, then every minute, until it is over.

Used by what writes into a run's folder. What always holds: however often it fails, people read at most one line a minute about
it; they hear when it is over.
"""

from __future__ import annotations

from collections.abc import Callable

from torchquorum.clock import SYSTEM, Clock

SAY_EVERY_S = 60.0


class RepeatedFailure:
    """One kind of failure.

    Args:
        say: Prints a line for people.
        clock: Tells the time.
    """

    def __init__(self, say: Callable[[str], None], clock: Clock = SYSTEM) -> None:
        self._say, self._clock = say, clock
        self._since: float | None = None
        self._said = 0.0

    @property
    def lasts(self) -> bool:
        """Whether the last try failed."""
        return self._since is not None

    @property
    def since_s(self) -> float:
        """Returns for how many seconds it has failed."""
        return 0.0 if self._since is None else self._clock.now() - self._since

    def tell(self, line: str) -> None:
        """It has failed: says so the first time, and when a minute has passed since it was last said."""
        now = self._clock.now()
        if self._since is None or now - self._said >= SAY_EVERY_S:
            lasting = "" if self._since is None else f" (for {now - self._since:.0f} s now)"
            self._since = now if self._since is None else self._since
            self._said = now
            self._say(f"{line}{lasting}")

    def over(self, line: str) -> None:
        """It has not failed: says so if it had before."""
        if self._since is not None:
            self._since = None
            self._say(line)
