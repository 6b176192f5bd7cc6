"""What a reader has of a run: variables, moving averages, buffers and rows of one version, each with when it last changed here.

Owned by a reader, under its lock; filled by `run_source` or `folder_source`. What always holds: between two calls all of it is of one
version; `tick` grows with every version that is taken, so whoever follows knows what has changed since it last looked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from torchquorum.memory.key_index import Keys
from torchquorum.update.table import VALUES, TablePart
from torchquorum.wire.plan import TableSpec

VARIABLE, AVERAGE, BUFFER = "variable", "average", "buffer"


class ReadVersion(int):
    """A version that was read: the global step, as a number, and what else is known of it.

    Attributes:
        versions: The version of each optimizer, by its name; the only one is called "".
        generation: A number of the creation of the variables that it belongs to.
        new_generation: Whether that is another than that of the version before: the run was restored, and this version may be smaller.
        age_s: How many seconds ago it was made, as far as known.
    """

    versions: dict[str, int]
    generation: int
    new_generation: bool
    age_s: float

    @classmethod
    def of(cls, versions: Mapping[str, int], generation: int, *, new_generation: bool, age_s: float) -> ReadVersion:
        """Returns a version, whose number is that of the first optimizer."""
        made = cls(next(iter(versions.values()), 0))
        made.versions, made.generation = dict(versions), generation
        made.new_generation, made.age_s = new_generation, age_s
        return made

    def __repr__(self) -> str:
        return f"ReadVersion({int(self)}, generation={self.generation:x})"


@dataclass(slots=True)
class RowChanges:
    """What of a table has changed since somebody last looked."""

    keys: list[Keys] = field(default_factory=list)
    gone: list[Keys] = field(default_factory=list)
    whole: bool = False

    def add(self, keys: Keys, gone: Keys, *, whole: bool) -> None:
        """Adds what a new version changes."""
        if whole:
            self.keys, self.gone, self.whole = [], [], True
        self.keys.append(keys)
        self.gone.append(gone)


class ReadCopy:
    """What a reader has.

    Attributes:
        names: Of the optimizers.
        versions: What it is, of each optimizer; empty as long as there is nothing.
        generation: Of which creation of the variables.
        complete: Whether everything is here; not, where only what has changed since a version was asked for.
        tick: Grows with each version.
        values: The tensors, by kind and name.
        tied: Further names of parameters.
        tables: The rows of those tables that are kept here.
        specs: All tables of the run, with their optimizer and their number there.
    """

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self.versions: list[int] = []
        self.generation = 0
        self.complete, self.tick = False, 0
        self.values: dict[tuple[str, str], torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        self.tables: dict[str, TablePart] = {}
        self.specs: dict[str, tuple[int, int, TableSpec]] = {}
        self._changed: dict[tuple[str, str], int] = {}
        self._restarted = 0
        self._followers: list[dict[str, RowChanges]] = []
        self._ticks: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been taken yet."""
        return not self.versions

    def of_kind(self, kind: str) -> dict[str, torch.Tensor]:
        """Returns the tensors of a kind, by name."""
        return {name: value for (k, name), value in self.values.items() if k == kind}

    # -- who fills it -------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """What follows is of another generation, or whole: everything counts as changed."""
        self.values.clear()
        self._changed.clear()
        self.tables.clear()
        self.versions, self.complete = [], False
        self._restarted = self.tick + 1
        for follower in self._followers:
            follower.clear()

    def keep(self, names: Iterable[str]) -> None:
        """From the next version on the rows of these tables are kept here."""
        for name in names:
            if name not in self.tables:
                part = TablePart(self.specs[name][2])
                part.states = {}  # nothing is trained here
                self.tables[name] = part

    def changes_at_next(self, kind: str, names: Iterable[str]) -> None:
        """These tensors change with the version that is being taken."""
        for name in names:
            self._changed[kind, name] = self.tick + 1

    def change_rows(self, name: str, keys: Keys, rows: torch.Tensor, gone: Keys, *, whole: bool) -> None:
        """Rows change with the version that is being taken; with `whole` all that were here have gone."""
        if whole:
            del self.tables[name]
            self.keep([name])
        part = self.tables[name]
        if len(gone):
            part.remove(gone)
        if len(keys):
            part.load(keys, {VALUES: rows})
        for follower in self._followers:
            follower.setdefault(name, RowChanges()).add(keys, gone, whole=whole)

    def taken(self, versions: list[int], generation: int) -> None:
        """All of a version is here."""
        self.versions, self.generation = list(versions), generation
        self.tick += 1
        self._ticks[generation, tuple(versions)] = self.tick
        while len(self._ticks) > 1000:
            del self._ticks[next(iter(self._ticks))]

    # -- who follows --------------------------------------------------------------------------------------------------

    def tick_of(self, generation: int, versions: tuple[int, ...]) -> int | None:
        """Returns when a version was here; None if it was not, or that is long ago."""
        return self._ticks.get((generation, versions))

    def changed_since(self, kind: str, tick: int) -> dict[str, torch.Tensor]:
        """Returns copies of the tensors of a kind that have changed since."""
        return {
            name: self.values[k, name].clone()
            for (k, name), at in self._changed.items()
            if k == kind and at > tick and (k, name) in self.values
        }

    def restarted_since(self, tick: int) -> bool:
        """Whether another generation, or a whole version, has begun since."""
        return self._restarted > tick

    def follow_rows(self) -> dict[str, RowChanges]:
        """Returns a place where changes of rows are noted from now on, until `unfollow_rows`."""
        follower: dict[str, RowChanges] = {}
        for name, part in self.tables.items():
            follower[name] = RowChanges([all_keys(part)], [np.empty(0, np.int64)], whole=True)
        self._followers.append(follower)
        return follower

    def unfollow_rows(self, follower: dict[str, RowChanges]) -> None:
        """Nobody looks there any more."""
        self._followers = [each for each in self._followers if each is not follower]


def all_keys(part: TablePart) -> Keys:
    """Returns the keys of all rows that are there."""
    return part.keys.at(np.flatnonzero(part.keys.live_mask())).astype(np.int64)
