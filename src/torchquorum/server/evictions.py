"""When rows whose time is over go: with which updates, and at what time. Pure.

Asked by shard 0 for every update that it writes to the log. What always holds: the time stands in the log, so every shard, the journal
and a restart remove the same rows; a table with a capacity is looked at with every update, one with an age sixteen times in it. Looks that
are counted in steps come at the same versions whether a run was interrupted or not.
"""

from __future__ import annotations

import math

from torchquorum.wire.plan import Plan

LOOKS = 16


class Evictions:
    """The evictions of one run."""

    def __init__(self, plan: Plan) -> None:
        tables = plan.tables
        self._steps = {1 for table in tables if table.capacity}
        self._steps |= {max(1, table.ttl_steps // LOOKS) for table in tables if table.ttl_steps}
        self._every_s = min((table.ttl_s / LOOKS for table in tables if table.ttl_s), default=math.inf)
        self._time = -math.inf

    def at(self, version: int, time: float) -> float:
        """Returns the time at which rows go with this update; 0 if none do."""
        by_step = any(version % every == 0 for every in self._steps)
        if not by_step and time - self._time < self._every_s:
            return 0.0
        self._time = time
        return time
