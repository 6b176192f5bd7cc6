"""What a reader is behind its public face: one source under one lock, the waits, the lines for people, and what was handed out last.

Used by `reader` and `follow`, from any thread. What always holds: whoever uses the source holds the lock; no wait is longer than `patience`
allows, and each is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from torchquorum.clock import Clock
from torchquorum.errors import ConfigError, TaskLostError
from torchquorum.memory.key_index import Keys
from torchquorum.reader.read_copy import AVERAGE, ReadCopy, ReadVersion
from torchquorum.reader.source import AwayError, Source, WantedParts
from torchquorum.wire.rpc import Patience

AGAIN_S = 0.1
KEPT_S = 1.0  # rows that are kept here are asked for again after so long, if nothing else was taken meanwhile


class ReaderCore:
    """A source, and how it is waited for.

    Args:
        source: Where versions come from.
        name: Of the reader.
        patience: How long a run that is not there is waited for.
        say: Prints a line for people.
        clock: Tells the time.

    Attributes:
        lock: Held by whoever uses the source.
        closed: Whether the reader was closed.
    """

    def __init__(self, source: Source, name: str, patience: Patience, say: Callable[[str], None], clock: Clock) -> None:
        self.lock = threading.RLock()
        self.source, self.name, self.clock, self.closed = source, name, clock, False
        self._patience = patience
        self._say = lambda line: say(f"reader {name}: {line}")
        self.all_tables, self.kept = False, frozenset[str]()
        self._given: tuple[int, list[int]] = (0, [])  # generation and versions that were handed out last
        self._away_since: float | None = None
        self._said_at = 0.0
        self._refreshed_at = -1e9

    @property
    def replica(self) -> ReadCopy:
        """Returns what is here."""
        return self.source.replica

    def lacks(self, averages: bool, tables: frozenset[str]) -> bool:
        """Whether something is wanted that is not here, so that it has to be waited for."""
        replica = self.replica
        return (
            replica.is_empty
            or not replica.complete
            or (averages and not replica.of_kind(AVERAGE))
            or not tables <= replica.tables.keys()
        )

    def refresh(self, wanted: WantedParts, *, wait: bool) -> None:
        """Takes the newest version. Without `wait`, one that cannot be had now is done without.

        Raises:
            TaskLostError: The run has not been there for too long.
            ConfigError: The reader is closed.
        """
        wanted.tables |= self.kept
        while True:
            self.check_open()
            if self.all_tables:
                wanted.tables |= self.replica.specs.keys()
            try:
                self.source.take(wanted)
            except AwayError as away:
                self.is_away(str(away))
                if not wait:
                    return
                self._rest()
                continue
            self.is_back()
            self._refreshed_at = self.clock.now()
            if not self.all_tables or self.replica.specs.keys() <= self.replica.tables.keys():
                return

    def all_here(self, tables: bool | frozenset[str]) -> bool:
        """Whether the rows of these tables, or of all, are here."""
        names = self.replica.specs.keys() if tables is True else tables or frozenset[str]()
        return names <= self.replica.tables.keys()

    def rows(self, asked: dict[str, Keys]) -> tuple[dict[str, torch.Tensor], ReadVersion]:
        """Returns rows of keys that are in order, each once, and their version: from here, if they are kept here.

        Raises:
            ConfigError: There is no such table, or it has no such keys.
            TaskLostError: The run has not been there for too long.
        """
        with self.lock:
            if self.all_tables or (self.kept and asked.keys() <= self.kept):
                lacks = self.lacks(False, self.kept)
                if lacks or self.clock.now() - self._refreshed_at > KEPT_S:
                    self.refresh(WantedParts(), wait=lacks)
                return self._kept_rows(asked), self.here()
            while True:
                self.check_open()
                try:
                    found, versions, age_s = self.source.rows(asked)
                except AwayError as away:
                    self.is_away(str(away))
                    self._rest()
                    continue
                self.is_back()
                return found, self._version(versions, self.source.generation, age_s)

    def _kept_rows(self, asked: dict[str, Keys]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, keys in asked.items():
            part = self.replica.tables.get(name)
            if part is None:
                raise no_table(name, self.replica)
            try:
                found[name] = part.gather(keys).clone()
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return found

    def here(self, *, note: bool = True) -> ReadVersion:
        """Returns the version that is here; with `note` it is handed out now."""
        replica = self.replica
        version = self._version(replica.versions, replica.generation, self.source.freshness.age_s)
        if note:
            if version.new_generation:
                self._say(
                    f"a new generation of the run: version {int(version)} after version {self._given[1][0]}; it was restored, or begun anew"
                )
            self._given = (replica.generation, list(replica.versions))
        return version

    def _version(self, versions: list[int], generation: int, age_s: float) -> ReadVersion:
        new = bool(self._given[1]) and self._given[0] != generation
        named = dict(zip(self.replica.names, versions, strict=True))
        return ReadVersion.of(named, generation, new_generation=new, age_s=age_s)

    # -- a run that is not there --------------------------------------------------------------------------------------

    def is_away(self, why: str) -> None:
        """Notes that the run cannot be read now, and says so now and then.

        Raises:
            TaskLostError: That has lasted too long.
        """
        now, over = self.clock.now(), self.source.over
        if self._away_since is None:
            self._away_since, self._said_at = now, now - self._patience.say_s + 1.0
        self.source.lost()
        away_s = now - self._away_since
        if away_s > self._patience.start_s and not over:
            raise TaskLostError(
                f"reader {self.name}: {why}, for {away_s:.0f} s. Check that the run goes on, and that {self.source.where} is where it is"
            )
        if now - self._said_at >= self._patience.say_s and not over:
            self._said_at = now
            has = f"; going on with version {self.replica.versions[0]}" if not self.replica.is_empty else ""
            self._say(f"{why}{has}: {away_s:.0f} s")

    def is_back(self) -> None:
        """Notes that the run can be read, and says so if it could not."""
        if self._away_since is not None:
            away_s, self._away_since = self.clock.now() - self._away_since, None
            if self._given[1] and not self.replica.is_empty:
                self._say(f"{self.source.where} is back after {away_s:.0f} s, at version {self.replica.versions[0]}")

    def _rest(self) -> None:
        """Lets others use the source for a moment."""
        self.lock.release()
        try:
            self.clock.sleep(AGAIN_S)
        finally:
            self.lock.acquire()

    def check_open(self) -> None:
        """Raises ConfigError if the reader was closed."""
        if self.closed:
            raise ConfigError(f"reader {self.name} is closed; make another tq.Reader")

    def close(self) -> None:
        """Closes the source."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self.source.close()


def no_table(name: str, replica: ReadCopy) -> ConfigError:
    """Returns the error that a run has no such table."""
    return ConfigError(f"the run has no table {name}; it has {', '.join(sorted(replica.specs)) or 'none'}")
