"""Following a run: version after version, each with what has changed since the one before, for `for` and `async for`.

Made by `Reader.follow`. What always holds: every change is from the version that was yielded last to the newest; whoever is slow leaves
versions out and holds up nobody; the last version of a run that ends is yielded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from torchquorum.reader.change import Change, change_since
from torchquorum.reader.core import ReaderCore
from torchquorum.reader.read_copy import ReadVersion, RowChanges
from torchquorum.reader.source import WantedParts

LEAST_NAP_S = 0.005
IDLE_NAP_S = 0.05


class Follow:
    """The changes of a run, for one who follows; see `Reader.follow` for the arguments."""

    def __init__(
        self,
        core: ReaderCore,
        *,
        since: ReadVersion | int | None,
        every_s: float,
        averages: bool,
        tables: bool | frozenset[str],
    ) -> None:
        self._core, self._every_s, self._averages, self._tables = core, every_s, averages, tables
        self._since = since
        self._tick = 0
        self._rows: dict[str, RowChanges] | None = None
        self._yielded_at = -1e9
        self._generation: int | None = since.generation if isinstance(since, ReadVersion) else None
        self._ended = False

    def __iter__(self) -> Iterator[Change]:
        return self

    def __next__(self) -> Change:
        while True:
            self._sleep(self._nap_s())
            found = self._look()
            if found is not None:
                return found
            if self._ended:
                raise StopIteration

    def __aiter__(self) -> AsyncIterator[Change]:
        return self

    async def __anext__(self) -> Change:
        while True:
            await asyncio.sleep(self._nap_s())
            found = await asyncio.to_thread(self._look)
            if found is not None:
                return found
            if self._ended:
                raise StopAsyncIteration

    def close(self) -> None:
        """Follows no more."""
        self._ended = True
        with self._core.lock:
            if self._rows is not None:
                self._core.replica.unfollow_rows(self._rows)
                self._rows = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _nap_s(self) -> float:
        """Returns how long to wait before looking again: a version is looked for as often as it may be yielded."""
        if self._ended:
            return 0.0
        left_s = self._yielded_at + self._every_s - self._core.clock.now()
        if left_s > 0:
            return left_s
        return 0.0 if self._yielded_at < 0 and self._tick == 0 else max(LEAST_NAP_S, min(self._every_s, IDLE_NAP_S))

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            self._core.clock.sleep(seconds)

    def _look(self) -> Change | None:
        """Looks for a newer version; returns what it changes."""
        core = self._core
        with core.lock:
            if self._ended or core.closed:
                self.close()
                return None
            replica = core.replica
            if self._rows is None:
                self._rows = replica.follow_rows()
            was_over = (
                core.source.over
            )  # heard after the question, it does not mean that the answer has the last version
            core.refresh(self._wanted(), wait=False)
            if replica.is_empty or not core.all_here(self._tables):
                return None
            if replica.tick <= self._tick:
                if was_over:
                    self.close()
                return None
            return self._take()

    def _wanted(self) -> WantedParts:
        """Returns what is to be taken; where nothing is here yet, perhaps only what has changed since a version."""
        replica, since = self._core.replica, self._since
        names = replica.specs.keys() if self._tables is True else self._tables or ()
        wanted = WantedParts(averages=self._averages, tables=frozenset(names))
        if since is not None:
            wanted.since = tuple(since.versions.values()) if isinstance(since, ReadVersion) else (since,)
            wanted.generation = since.generation if isinstance(since, ReadVersion) else 0
            if not self._tick and not replica.is_empty and replica.complete:
                generation = wanted.generation or replica.generation
                self._tick = replica.tick_of(generation, wanted.since) or 0
        return wanted

    def _take(self) -> Change:
        core, before = self._core, self._generation
        version = core.here()
        assert self._rows is not None
        version.new_generation = before is not None and before != version.generation
        change = change_since(
            core.replica, self._tick, self._rows, version, over=core.source.over, averages=self._averages
        )
        self._tick, self._generation = core.replica.tick, version.generation
        self._yielded_at = core.clock.now()
        return change
