"""How shard 0 makes a checkpoint of all shards: a snapshot in the log, a part from each, the workers' positions, a manifest.

Owned by the service of ps task 0. One checkpoint is made at a time. What always holds: it is published only when every
shard has written its part of the same version; whatever fails is said, removed and costs nothing that was saved before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torchquorum.formats.checkpoint_manifest import FileInfo, Manifest, Stored
from torchquorum.formats.checkpoint_write import begin, part_name
from torchquorum.server.saver import Published, Saver
from torchquorum.transport.messages import Part, Plan, SaveState

POSITIONS_S = 5.0
REMEMBERED_POSITIONS = 4


@dataclass(slots=True)
class Saving:
    """A checkpoint in the making."""

    number: int
    version: int
    partial: Path
    keep: int
    begun_at: float
    parts: dict[int, Part] = field(default_factory=dict)
    publishing: bool = False


class Checkpoints:
    """The checkpoint that is being made, and how the last one went."""

    def __init__(self, plan: Plan, saver: Saver) -> None:
        self._plan, self._saver = plan, saver
        self.saving: Saving | None = None
        self.last = SaveState(-1, "none", -1, "", "")
        self._positions: dict[int, dict[int, dict[str, Any]]] = {}
        self.restored: dict[str, dict[str, Any]] = {}

    def begin(self, number: int, version: int, folder: Path, keep: int, now: float) -> Saving:
        """Starts a checkpoint; the snapshot is then to be put into the log."""
        self.saving = Saving(number, version, begin(folder, version), keep, now)
        return self.saving

    def state(self, number: int) -> SaveState | None:
        """Returns how checkpoint `number` goes, if it is known."""
        if self.saving is not None and self.saving.number == number:
            return SaveState(number, "running", self.saving.version, "", "")
        return self.last if self.last.number == number else None

    def position(self, worker: int, version: int, body: dict[str, Any]) -> None:
        """Notes where a worker stood when it first held a version."""
        known = self._positions.setdefault(worker, {})
        known[version] = {**body, "version": version}
        while len(known) > REMEMBERED_POSITIONS:
            del known[min(known)]

    def wants_position(self, worker: int) -> int:
        """Returns the version for which a worker's position is wanted, or -1."""
        saving = self.saving
        if saving is None or saving.publishing or self._position_of(worker, saving.version) is not None:
            return -1
        return saving.version

    def _position_of(self, worker: int, version: int) -> dict[str, Any] | None:
        known = self._positions.get(worker, {})
        if version in known:
            return known[version]
        if self._plan.rule.once_per_round or not known:
            return None
        return known[max(known)]

    def part(self, part: Part) -> None:
        """Takes a shard's part."""
        if self.saving is not None and self.saving.number == part.number:
            self.saving.parts[part.shard] = part

    def advance(self, live: list[int], now: float) -> str | None:
        """Publishes when all is there; returns a line for people when something went wrong."""
        saving = self.saving
        if saving is None or saving.publishing:
            return None
        failed = [p for p in saving.parts.values() if p.error]
        if failed:
            self._fail(saving, failed[0].error)
            return f"no checkpoint at step {saving.version}: {failed[0].error}; training goes on"
        if len(saving.parts) < self._plan.num_shards:
            return None
        missing = [w for w in live if self._position_of(w, saving.version) is None]
        if missing and now - saving.begun_at < POSITIONS_S:
            return None
        saving.publishing = True
        self._saver.publish(saving.number, saving.partial, self._manifest(saving), saving.keep)
        return None

    def published(self, result: Published) -> str:
        """Notes that a checkpoint is complete, or failed; returns a line for people."""
        saving = self.saving
        assert saving is not None and saving.number == result.number
        if result.path is None:
            self._fail(saving, result.error)
            return f"no checkpoint at step {saving.version}: {result.error}; training goes on"
        self.saving = None
        self.last = SaveState(saving.number, "done", saving.version, str(result.path), "")
        return f"saved {result.path}"

    def _fail(self, saving: Saving, error: str) -> None:
        self._saver.abandon(saving.partial)
        self.saving = None
        self.last = SaveState(saving.number, "failed", saving.version, "", error)

    def _manifest(self, saving: Saving) -> Manifest:
        files, pieces, scalars = {}, [], {}
        for shard, part in sorted(saving.parts.items()):
            files[part_name(shard, self._plan.num_shards)] = FileInfo(part.size_bytes, part.sha256)
            pieces += msgspec.convert(part.pieces, list[Stored])
            scalars.update(part.scalars)
        workers = {}
        for worker in range(self._plan.num_workers):
            body = self._position_of(worker, saving.version)
            if body is not None:
                workers[str(worker)] = body
        return Manifest(
            step=saving.version,
            num_ps=self._plan.num_shards,
            plan=msgspec.to_builtins(self._plan),
            scalars={"optimizer": scalars},
            pieces=pieces,
            workers=workers,
            files=files,
        )
