"""What the ps tasks of a replay share with its launcher: how far each is, what they keep, and what was not as recorded.

Owned by the launcher; written by the threads of the ps tasks. What always holds: a difference that was found first stays the first.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torchquorum.formats.row_file import KEYS, VALUES
from torchquorum.replay.kept_state import KeptState
from torchquorum.replay.script import LifeKey, Script, ScriptedLife
from torchquorum.rules.quorum import Key
from torchquorum.server.shard import Shard
from torchquorum.wire.messages import Apply, Push

Place = tuple[int, int]  # a generation, and how many updates there are, of all optimizers


@dataclass
class ReplayProgress:
    """How far a replay is.

    Attributes:
        script: What is followed.
        wanted: The places at which the variables are kept.
        folder: Takes the place of the run's folder.
        recorded: The run's folder, which is only read.
        end: How many steps are followed.
        looked_at: The updates whose gradients are kept, by generation and place: after the first, up to the second.
        gradients: Of each of their gradients, by worker, life and local step, its variables; of tables, the keys and the rows.
        kept: What was kept.
        at: Of each ps task, how many steps it has followed.
        failed: Why the replay cannot go on; empty if it can.
        differences: What was computed otherwise than recorded, first things first.
        left: The lives that have left the run.
        awaited: What each ps task waits for, in words.
    """

    script: Script
    wanted: set[Place]
    folder: str
    recorded: Path
    end: int = -1
    looked_at: tuple[Place, Place] = (-1, -1), (-1, -1)
    gradients: dict[tuple[int, int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    kept: dict[Place, KeptState] = field(default_factory=dict)
    at: list[int] = field(default_factory=list)
    failed: str = ""
    differences: list[str] = field(default_factory=list)
    left: set[LifeKey] = field(default_factory=set)
    awaited: dict[int, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, place: Place, shard: Shard) -> None:
        """Keeps a shard's part of the variables, if they are wanted as they are now."""
        if place not in self.wanted:
            return
        with self.lock:
            kept = self.kept.setdefault(place, KeptState([track.version for track in shard.tracks], shard.plan))
            if shard.index not in kept.shards:
                kept.add(shard)

    def __post_init__(self) -> None:
        self.end = len(self.script.steps) if self.end < 0 else self.end

    def look_at(self, shard: Shard, update: Apply) -> None:
        """Keeps a shard's part of the gradients of an update that is about to be made, if they are wanted."""
        place = shard.generation, shard.place + 1
        if not self.looked_at[0] < place <= self.looked_at[1] or place[0] != self.looked_at[1][0]:
            return
        track = shard.tracks[update.track]
        with self.lock:
            for name in update.keys:
                gradient = track.gradients.copy_of(Key(*name))
                whole = self.gradients.setdefault(name, {})
                for section, values in zip(track.region.sections, gradient.sections, strict=True):
                    for piece in section.pieces:
                        of = track.plan.variables[piece.variable]
                        if piece.variable not in gradient.absent:
                            full = whole.setdefault(of.name, torch.zeros(tuple(of.shape), dtype=values.dtype))
                            part = values[piece.offset : piece.offset + piece.numel]
                            full.view(-1)[piece.start : piece.start + piece.numel] = part
                for table, keys, rows in track.tables.gradient_of(Key(*name)):
                    for column, part in ((KEYS, torch.from_numpy(keys.copy())), (VALUES, rows.clone())):
                        before = whole.get(f"{table}/{column}")
                        whole[f"{table}/{column}"] = part if before is None else torch.cat([before, part])

    def fail(self, why: str) -> None:
        """The replay cannot go on."""
        with self.lock:
            self.failed = self.failed or why

    def differs(self, what: str) -> None:
        """Something was computed otherwise than recorded."""
        with self.lock:
            self.differences.append(what)

    def compare(self, life: ScriptedLife, push: Push) -> None:
        """Compares a gradient with what the record has of it: the first loss that differs says where the computing does."""
        decided = self.script.decided.get((*life.key, push.local_step))
        if decided is None or decided.reason == "old incarnation":
            return
        if decided.loss != push.loss:
            self.differs(
                f"{life}, local step {push.local_step}, computed at version {push.version}: its loss is {push.loss}, and was {decided.loss}"
            )
        elif decided.version != push.version:
            self.differs(
                f"{life}, local step {push.local_step}: computed at version {push.version}, and was computed at {decided.version}"
            )

    @property
    def over(self) -> bool:
        """Whether every ps task has followed all steps."""
        return bool(self.at) and min(self.at) >= self.end
