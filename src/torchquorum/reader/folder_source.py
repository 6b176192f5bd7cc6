"""A run that is read from its folder: the checkpoints that it publishes, without any task of it.

Owned by a reader, used under its lock. What always holds: a checkpoint is taken whole or not at all; a damaged one, and one that is removed
meanwhile, is passed over.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import torch

from torchquorum.clock import Clock
from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import (
    CheckpointError,
    CheckpointInfo,
    CheckpointReader,
    age_order,
    list_checkpoints,
)
from torchquorum.formats.row_file import read_chain
from torchquorum.formats.storage import is_remote, locate
from torchquorum.memory.key_index import Keys
from torchquorum.reader.freshness import Freshness
from torchquorum.reader.read_copy import AVERAGE, BUFFER, VARIABLE, ReadCopy
from torchquorum.reader.source import AwayError, WantedParts
from torchquorum.wire.plan import TableSpec

LOOK_EVERY_S = 0.5
LOOK_REMOTE_S = 5.0


class FolderSource:
    """Follows the checkpoints in a run's folder.

    Args:
        folder: The folder, which need not be there yet.
        clock: Tells the time.
    """

    def __init__(self, folder: str | os.PathLike[str], clock: Clock) -> None:
        self._folder, self._clock = locate(folder), clock
        self._every_s = LOOK_REMOTE_S if is_remote(folder) else LOOK_EVERY_S
        self.replica, self.freshness = ReadCopy(), Freshness(clock)
        self.over, self.way = False, "checkpoints"
        self.generation = self.received_bytes = 0
        self._looked_at = -1e9
        self._taken: tuple[float, int] | None = None
        self._passed_over: set[tuple[float, int]] = set()
        self._report = self._read_report()

    @property
    def where(self) -> str:
        """Returns the folder, for lines."""
        return str(self._folder)

    def take(self, wanted: WantedParts) -> None:
        """Takes the newest checkpoint, if there is another than the one that is here.

        Raises:
            AwayError: There is none yet, or the folder cannot be read now.
        """
        replica = self.replica
        lacks_tables = not wanted.tables <= replica.tables.keys()
        lacks_averages = wanted.averages and not replica.of_kind(AVERAGE)
        now = self._clock.now()
        if now - self._looked_at < self._every_s and not (replica.is_empty or lacks_tables or lacks_averages):
            return
        self._looked_at = now
        over = self._read_report() != self._report  # before the checkpoints: the last one is there when the report is
        if replica.is_empty and wanted.since:
            self._take_since(wanted)
        found = [info for info in self._list() if self._may_take(info)]
        if found and (age_order(found[-1]) != self._taken or lacks_tables):
            self._take_newest(found, wanted)
        elif replica.is_empty:
            raise AwayError(f"{self._folder} has no checkpoint yet")
        self.over = over and bool(found) and age_order(found[-1]) == self._taken
        if self.over:
            self.freshness.stop()

    def _may_take(self, info: CheckpointInfo) -> bool:
        age = age_order(info)
        return age not in self._passed_over and info.problem is None and (self._taken is None or age >= self._taken)

    def _list(self) -> list[CheckpointInfo]:
        try:
            return sorted(list_checkpoints(self._folder), key=age_order)
        except CheckpointError as error:
            raise AwayError(str(error)) from None

    def _take_newest(self, found: list[CheckpointInfo], wanted: WantedParts) -> None:
        for info in reversed(found):
            try:
                self._take(info, wanted)
                return
            except (CheckpointError, OSError):
                self._passed_over.add(age_order(info))
        if self.replica.is_empty:
            raise AwayError(f"{self._folder} has no checkpoint that can be read")

    def _take_since(self, wanted: WantedParts) -> None:
        """Takes the checkpoint of a version that is known already, if it is still there: what differs from it is what has changed."""
        for info in reversed(self._list()):
            if (info.step,) == wanted.since[:1] and info.problem is None:
                try:
                    self._take(info, wanted)
                except (CheckpointError, OSError):
                    continue
                if wanted.generation in (0, self.generation):
                    return
                self.replica.restart()
                self._taken = None

    def _take(self, info: CheckpointInfo, wanted: WantedParts) -> None:
        replica = self.replica
        with CheckpointReader(info.path) as reader:
            manifest = reader.manifest
            plan = manifest.plan
            plans: list[dict[str, Any]] = [plan, *plan.get("more", [])]
            values: dict[tuple[str, str], torch.Tensor] = {}
            for name, spec in reader.variables().items():
                values[VARIABLE, name] = reader.read("variable", name).view(spec.shape)
            for name, spec in reader.averages().items():
                values[AVERAGE, name] = reader.read("average", name).view(spec.shape)
            for name, spec in reader.buffers().items():
                values[BUFFER, name] = reader.read("buffer", name).view(spec.shape)
            specs = {
                table["name"]: (track, number, msgspec.convert(table, TableSpec))
                for track, of in enumerate(plans)
                for number, table in enumerate(of.get("tables", []))
            }
            unknown = wanted.tables - specs.keys()
            if unknown:
                raise ConfigError(
                    f"the run has no table {sorted(unknown)[0]}; it has {', '.join(sorted(specs)) or 'none'}"
                )
            names = wanted.tables | replica.tables.keys() & specs.keys()
            rows = {name: self._rows_of(reader, name) for name in names}
        if not replica.is_empty and (
            manifest.generation != replica.generation or values.keys() != replica.values.keys()
        ):
            replica.restart()
        for key, value in values.items():
            before = replica.values.get(key)
            if before is None or not torch.equal(before, value):
                replica.changes_at_next(key[0], [key[1]])
        replica.values, replica.specs, replica.complete = values, specs, True
        replica.names = [str(of.get("name", "")) for of in plans]
        tied = plan.get("tied", {})
        replica.tied = tied if isinstance(tied, dict) else {}
        for name, (keys, found) in rows.items():
            self._change_rows(name, keys, found)
        self.generation = manifest.generation
        versions = [manifest.step, *(int(saved["version"]) for saved in manifest.scalars.get("more", []))]
        replica.taken(versions, manifest.generation)
        self._taken = age_order(info)
        self.freshness.took(self._clock.wall() - info.created_at)

    def _rows_of(self, reader: CheckpointReader, name: str) -> tuple[Keys, torch.Tensor]:
        parts = [read_chain([reader.file(f) for f in s.files], name) for s in reader.manifest.tables if s.name == name]
        return torch.cat([keys for keys, _ in parts]).numpy(), torch.cat([rows for _, rows in parts])

    def _change_rows(self, name: str, keys: Keys, rows: torch.Tensor) -> None:
        """Takes the rows of a table, and notes which of them differ from those that are here."""
        replica = self.replica
        part = replica.tables.get(name)
        if part is None or replica.is_empty:
            replica.keep([name])
            replica.change_rows(name, keys, rows, np.empty(0, np.int64), whole=True)
            return
        differ = (part.gather(keys) != rows).any(1).numpy()
        new = part.keys.find(keys) < 0
        mine = part.keys.at(np.flatnonzero(part.keys.live_mask())) if part.keys.grows else np.empty(0, np.int64)
        chosen = np.flatnonzero(differ | new)
        gone = mine[~np.isin(mine, keys)]
        replica.change_rows(name, keys[chosen], rows[torch.from_numpy(chosen)], gone, whole=False)

    def rows(self, asked: dict[str, Keys]) -> tuple[dict[str, torch.Tensor], list[int], float]:
        """Returns rows of tables, of the newest checkpoint; the tables are kept here from now on."""
        self.take(WantedParts(tables=frozenset(asked)))
        found: dict[str, torch.Tensor] = {}
        for name, keys in asked.items():
            try:
                found[name] = self.replica.tables[name].gather(keys).clone()
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return found, self.replica.versions, self.freshness.age_s

    def lost(self) -> None:
        """Does nothing: the folder is looked at again."""

    def close(self) -> None:
        """Does nothing: no file is open."""

    def _read_report(self) -> bytes:
        try:
            return (self._folder / "report.json").read_bytes()
        except OSError:
            return b""
