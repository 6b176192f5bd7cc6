"""A checkpoint in the making, what each shard says of its part of it, and the newest that is complete.

Owned by `torchquorum.server.checkpoints`, on shard 0; `part_of` is of every shard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchquorum.formats.checkpoint_manifest import FileInfo, Manifest, Stored, StoredTable
from torchquorum.formats.checkpoint_write import part_name
from torchquorum.formats.storage import Location
from torchquorum.server.saver import Written
from torchquorum.wire.messages import Part, Plan
from torchquorum.wire.settings import Settings


@dataclass(slots=True)
class NewestCheckpoint:
    """The newest complete checkpoint, of this run or of the one that it continues; or, without a path, where the run began.

    Attributes:
        version: The first optimizer's version.
        place: Its place of the log.
        path: Where it is; empty for none.
        written_in: The folder in which it was written, if this creation of the variables wrote it.
    """

    version: int
    place: int
    path: str = ""
    written_in: str = ""

    @property
    def base(self) -> tuple[str, str]:
        """Returns what the next checkpoint can go on from: path and folder of this one; empty if it was written by others."""
        return (self.path, self.written_in) if self.written_in else ("", "")


@dataclass(slots=True)
class Saving:
    """A checkpoint in the making.

    `version` is the first optimizer's; `versions` are all, at this `place` of the log, where workers stand at `position`.
    """

    number: int
    version: int
    folder: str
    partial: Location
    keep: int
    begun_at: float
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: list[Settings] = field(default_factory=list)
    place: int = 0
    position: int = 0
    versions: list[int] = field(default_factory=list)
    parts: dict[int, Part] = field(default_factory=dict)
    publishing: bool = False
    waits_for_positions: bool = True

    @property
    def nonfinite(self) -> list[str]:
        """Returns the variables and tables that hold NaN or infinity, as far as the parts are here."""
        return sorted({name for part in self.parts.values() for name in part.nonfinite})

    def manifest(self, plan: Plan, generation: int, workers: dict[str, dict[str, Any]], wall: float) -> Manifest:
        """Returns the manifest, once all parts are there; `workers` has their positions."""
        files, pieces, scalars, tables = {}, [], {}, list[StoredTable]()
        for shard, part in sorted(self.parts.items()):
            files[part_name(shard, plan.num_shards)] = FileInfo(part.size_bytes, part.sha256)
            pieces += msgspec.convert(part.pieces, list[Stored])
            scalars.update(part.scalars)
            if part.tables:
                files |= {name: FileInfo(size_bytes, digest) for name, size_bytes, digest in part.shared}
                files[part.rows_file] = FileInfo(part.rows_bytes, part.rows_sha256)
                tables += msgspec.convert(part.tables, list[StoredTable])
        return Manifest(
            step=self.version,
            created_at=wall,
            num_ps=plan.num_shards,
            generation=generation,
            plan=msgspec.to_builtins(plan),
            scalars={"optimizer": scalars, "settings": self.settings[0], **self._of_others(plan.names)},
            pieces=pieces,
            tables=tables,
            workers=workers,
            data=self.data,
            nonfinite=self.nonfinite,
            files=files,
        )

    def _of_others(self, names: list[str]) -> dict[str, Any]:
        """Returns what a manifest has of the optimizers after the first."""
        more = zip(names[1:], self.versions[1:], self.settings[1:], strict=True)
        found = [{"name": name, "version": version, "settings": settings} for name, version, settings in more]
        return {"more": found} if found else {}


def part_of(shard: int, written: Written) -> Part:
    """Returns the message to shard 0 about a part that was written, or failed to be."""
    info, snapshot = written.info or FileInfo(0, ""), written.snapshot
    pieces = msgspec.to_builtins(snapshot.pieces)
    rows, tables = written.rows or FileInfo(0, ""), msgspec.to_builtins(snapshot.tables)
    chain = snapshot.chain
    nonfinite = set(written.nonfinite)
    if chain is not None:
        chain.info = written.rows
        chain.nonfinite = chain.nonfinite | (nonfinite & {table.name for table in snapshot.rows})
        nonfinite |= chain.nonfinite
    return Part(
        shard=shard,
        number=written.number,
        size_bytes=info.size_bytes,
        sha256=info.sha256,
        pieces=pieces,
        scalars=snapshot.scalars,
        error=written.error,
        tables=tables,
        rows_bytes=rows.size_bytes,
        rows_sha256=rows.sha256,
        rows_file=chain.name if chain is not None else "",
        shared=[(name, info.size_bytes, info.sha256) for name, info in chain.files.items()]
        if chain is not None
        else [],
        nonfinite=sorted(nonfinite),
    )
