"""What the ps tasks of a replay share with its launcher: how far each is, what they keep, and what was not as recorded.

Owned by the launcher; written by the threads of the ps tasks. What always holds: a difference that was found first stays the first.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torchquorum.replay.kept import KeptState
from torchquorum.replay.script import LifeKey, Script
from torchquorum.server.shard import Shard

Place = tuple[int, int]  # a generation, and a version of it


@dataclass
class Progress:
    """How far a replay is.

    Attributes:
        script: What is followed.
        wanted: The places at which the variables are kept.
        folder: Takes the place of the run's folder.
        stop_at: The place at which the replay ends; None for the record's end.
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
            kept = self.kept.setdefault(place, KeptState(place[1], shard.plan))
            if shard.index not in kept.shards:
                kept.add(shard)

    def fail(self, why: str) -> None:
        """The replay cannot go on."""
        with self.lock:
            self.failed = self.failed or why

    def differs(self, what: str) -> None:
        """Something was computed otherwise than recorded."""
        with self.lock:
            self.differences.append(what)

    @property
    def over(self) -> bool:
        """Whether every ps task has followed all steps."""
        return bool(self.at) and min(self.at) >= len(self.script.steps)
