"""What a record says, made ready to be followed: the steps of the log, and for every life of a worker what it asked and was told.

Pure: made once from the record's items, read by the replay's ps tasks and its launcher. What always holds: the steps are in the order
of the record; a worker is answered at a version that every step before has made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import torchquorum.wire.messages as m
from torchquorum.formats.record_file import RecordError, read_record
from torchquorum.session.recording import LifeBody
from torchquorum.wire.recorded import (
    DIED,
    JOIN,
    LEFT,
    PUSH,
    Answer,
    AnyItem,
    Began,
    Decided,
    GaveBuffers,
    Gone,
    Handed,
    Life,
    Placed,
    decode_items,
)

LifeKey = tuple[int, int]  # a worker, and which of its lives


@dataclass(slots=True)
class Step:
    """One step of the replay: an item of the record, and which creation of the variables it belongs to."""

    item: Began | Answer | m.Apply | m.Assigned | m.Drop | m.Snapshot | m.End
    generation: int


@dataclass(slots=True)
class ScriptedLife:
    """One process of a worker.

    Attributes:
        worker: Which worker.
        incarnation: Which of its lives.
        body: What it said of itself.
        first: The step before which it has to be there.
        last: The last step that concerns it.
        how: How it went out of the run; empty if the record does not say.
        generations: Those that it joined, in order.
        pushes: Of each of these, the last local step that was answered there.
        first_pushes: Of each of these, the first one.
        handed: The batches that it was given, by share.
        buffers: The buffers that it was given.
        placed: The positions that it was given, by generation.
    """

    worker: int
    incarnation: int
    body: LifeBody
    first: int = -1
    last: int = -1
    how: str = ""
    generations: list[int] = field(default_factory=list)
    pushes: dict[int, int] = field(default_factory=dict)
    first_pushes: dict[int, int] = field(default_factory=dict)
    handed: dict[str, list[Handed]] = field(default_factory=dict)
    buffers: list[GaveBuffers] = field(default_factory=list)
    placed: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def key(self) -> LifeKey:
        """Returns its name."""
        return self.worker, self.incarnation

    def __str__(self) -> str:
        return f"/job:worker/task:{self.worker}"


@dataclass(slots=True)
class Script:
    """A record, ready to be followed.

    Attributes:
        steps: What happens, in order.
        lives: The processes of workers.
        decided: What became of every gradient.
        began: The creations of the variables, in order.
        last_step: The newest version that the record has.
    """

    steps: list[Step] = field(default_factory=list)
    lives: dict[LifeKey, ScriptedLife] = field(default_factory=dict)
    decided: dict[tuple[int, int, int], Decided] = field(default_factory=dict)
    began: list[Began] = field(default_factory=list)

    @property
    def num_shards(self) -> int:
        """Returns how many ps tasks the replay needs."""
        return max(began.plan.num_shards for began in self.began)

    @property
    def num_workers(self) -> int:
        """Returns how many workers there can be."""
        return max(began.plan.num_workers for began in self.began)

    @property
    def bases(self) -> set[tuple[int, int]]:
        """Returns the generations and versions from which later generations go on."""
        return {(began.base, began.version) for began in self.began if began.base >= 0}

    def before_loss(self, life: ScriptedLife, generation: int) -> int:
        """Returns the local step at which a life lost this creation of the variables; 0 if it did not."""
        later = life.generations[life.generations.index(generation) + 1 :] if generation in life.generations else []
        found = next((life.first_pushes[g] for g in later if g in life.first_pushes), 0)
        return max(found - 1, life.pushes.get(generation, 0) + 1) if later else 0


class _Reading:
    """Makes a script of a record's items."""

    def __init__(self) -> None:
        self.script = Script()
        self._generation = -1
        self._joined: set[LifeKey] = set()

    def take(self, item: AnyItem) -> None:
        match item:
            case Began():
                self._generation = item.generation
                self._joined.clear()
                self.script.began.append(item)
                self._add(item)
            case Life():
                self._life(item)
            case Decided():
                self.script.decided[item.worker, item.incarnation, item.local_step] = item
            case Answer():
                self._answer(item)
            case Handed():
                life = self.script.lives[item.worker, item.incarnation]
                life.handed.setdefault(item.share, []).append(item)
            case GaveBuffers():
                self.script.lives[item.worker, item.incarnation].buffers.append(item)
            case Placed():
                life = self.script.lives[item.worker, item.incarnation]
                life.placed.setdefault(self._generation, msgspec.msgpack.decode(item.body))
            case Gone():
                life = self.script.lives.get((item.worker, item.incarnation))
                if life is not None and not (item.how == DIED and life.how):
                    life.how = item.how
                    life.last = max(life.last, len(self.script.steps) - 1)
            case _:
                self._add(item)

    def _add(self, item: Any) -> None:
        self.script.steps.append(Step(item, self._generation))

    def _life(self, item: Life) -> None:
        key = item.worker, item.incarnation
        if key not in self.script.lives:
            try:
                body = msgspec.msgpack.decode(item.body, type=LifeBody)
            except msgspec.DecodeError as error:
                raise RecordError(f"/job:worker/task:{item.worker} was recorded by another release: {error}") from error
            self.script.lives[key] = ScriptedLife(item.worker, item.incarnation, body)

    def _answer(self, item: Answer) -> None:
        key = item.release.worker, item.release.incarnation
        life = self.script.lives.get(key)
        if life is None:
            raise RecordError(
                f"the record has answers to /job:worker/task:{key[0]} and does not say what its process is: it was not asked to record"
            )
        if item.kind == JOIN and key not in self._joined:
            self._joined.add(key)
            life.generations.append(self._generation)
        elif item.kind == PUSH:
            life.pushes[self._generation] = item.number
            life.first_pushes.setdefault(self._generation, item.number)
        life.how = ""
        life.first = len(self.script.steps) if life.first < 0 else life.first
        life.last = len(self.script.steps)
        self._add(item)


def read_script(folder: Path) -> Script:
    """Reads the record of a run's folder.

    Raises:
        RecordError: There is none, or it cannot be read or followed.
    """
    items: list[AnyItem] = []
    for frame in read_record(folder):
        try:
            items += decode_items(frame)
        except msgspec.DecodeError as error:
            raise RecordError(f"the record in {folder} was written by another release: {error}") from error
    return make_script(items, folder)


def make_script(items: Iterable[AnyItem], folder: Path) -> Script:
    """Makes a script of a record's items.

    Raises:
        RecordError: They cannot be followed.
    """
    reading = _Reading()
    for item in items:
        reading.take(item)
    script = reading.script
    if not script.steps:
        raise RecordError(f"the record in {folder} is empty: the run ended before its variables were created")
    if not isinstance(script.steps[0].item, Began):
        raise RecordError(f"the record in {folder} has no beginning")
    _end_loops(script)
    return script


def _end_loops(script: Script) -> None:
    """A worker that left although its last answer did not end the run was asked to, or its loop was over: its last answer says so."""
    for life in script.lives.values():
        if life.how != LEFT:
            continue
        for step in reversed(script.steps):
            item = step.item
            if isinstance(item, Answer) and (item.release.worker, item.release.incarnation) == life.key:
                step.item = msgspec.structs.replace(item, release=msgspec.structs.replace(item.release, stop=True))
                break
