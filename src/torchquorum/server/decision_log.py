"""The log of decisions: what shard 0 appends and every shard follows, in order.

Owned by the leader; read by `run` for shard 0 itself and by `followers` for the others. What always holds: an entry is kept
until every shard has followed it.
"""

from __future__ import annotations

from collections.abc import Callable

from torchquorum.wire.messages import Apply, Assigned, Drop, End, ReadOut, Release, RowsOut, Snapshot

LogEntry = Apply | Assigned | Drop | Release | RowsOut | ReadOut | Snapshot | End


class DecisionLog:
    """The entries that some shard has not followed yet; `start` is the number of the first, `record` hears of every one."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self.entries: list[LogEntry] = []
        self.start = 0
        self.record: Callable[[LogEntry], None] = lambda _entry: None
        self._followed: dict[int, int] = {}

    def append(self, entry: LogEntry) -> None:
        """Adds an entry."""
        self.record(entry)
        self.entries.append(entry)

    def unseen_by(self, shard: int) -> tuple[int, list[LogEntry]]:
        """Returns the entries that a shard has not followed yet, and the number of the first."""
        first = max(self._followed.get(shard, 0), self.start)
        return first, self.entries[first - self.start :]

    def behind(self) -> set[int]:
        """Returns the shards other than 0 that have not followed the log to its end."""
        end = self.start + len(self.entries)
        return {shard for shard in range(1, self._num_shards) if self._followed.get(shard, 0) < end}

    def followed(self, shard: int, count: int) -> None:
        """A shard has followed the first `count` entries; what all have followed is dropped."""
        self._followed[shard] = max(count, self._followed.get(shard, 0))
        if len(self._followed) == self._num_shards:
            done = min(self._followed.values())
            del self.entries[: done - self.start]
            self.start = max(self.start, done)
