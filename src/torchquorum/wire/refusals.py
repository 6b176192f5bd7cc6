"""Connections that a listening socket refused: counted by reason, and told to people now and then.

Owned by one thread, which adds and reports; the counts may be read on any thread. What always holds: a flood of refused connections
costs a few counters and at most one line every `every_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torchquorum.clock import SYSTEM, Clock

SAY_EVERY_S = 10.0
MOST_UNTOLD = 100

WRONG_SECRET, NO_SECRET, UNEXPECTED_SECRET = "wrong secret", "no secret", "a secret where none is used"
OTHER_PROTOCOL, OTHER_VERSION, ZEROMQ = "not torchquorum", "another version of torchquorum", "a torchquorum of before"
UNFINISHED, TOO_SLOW, TOO_MANY = "hung up before the greeting", "no greeting in time", "too many connections"
OTHER_USER, TALKS_TOO_MUCH = "another user of this host", "talks too much"
_QUIET = (UNFINISHED, TALKS_TOO_MUCH)  # a port scan, a task that died: worth a number, not a line


class Refusals:
    """The counts, and what has not been told yet.

    Args:
        say: Prints a line for people.
        every_s: At most one line in this time.
        clock: Tells the time.
    """

    def __init__(self, say: Callable[[str], None], *, every_s: float = SAY_EVERY_S, clock: Clock = SYSTEM) -> None:
        self._say, self._every_s, self._clock = say, every_s, clock
        self.counts: Counter[str] = Counter()
        self.untold: Counter[str] = Counter()
        self._told_at = float("-inf")

    def add(self, why: str, address: str) -> None:
        """Counts a connection; most reasons are worth a line."""
        self.counts[why] += 1
        if why in _QUIET:
            return
        self.untold[f"{why}, from {address}" if address else why] += 1
        while len(self.untold) > MOST_UNTOLD:  # the oldest lose their address
            count = self.untold.pop(next(iter(self.untold)))  # perhaps the very entry to which it is added
            self.untold[why] += count

    def report(self) -> None:
        """Says what was most frequent since the last line, if it is time for one."""
        now = self._clock.now()
        if not self.untold or now - self._told_at < self._every_s:
            return
        self._told_at = now
        (what, _), count = self.untold.most_common(1)[0], sum(self.untold.values())
        many = f" (and {count - 1} more)" if count > 1 else ""
        self.untold.clear()
        self._say(f"turned a connection away: {what}{many}")
