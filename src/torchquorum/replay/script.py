"""What a record says, made ready to be followed: the steps of the log, and for every life of a worker what it asked and was told.

Pure: made once from the record's items, read by the replay's ps tasks and its launcher. What always holds: the steps are in the order
of the record; a worker is answered at a version that every step before has made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import torchquorum.wire.messages as m
from torchquorum.formats.record_file import RunRecordError, read_record
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
    GaveRows,
    Gone,
    Handed,
    Life,
    Opened,
    Placed,
    decode_items,
)

LifeKey = tuple[int, int]  # a worker, and which of its lives


@dataclass(slots=True)
class ReplayStep:
    """One step of the replay: an item of the record, and which creation of the variables it belongs to."""

    item: Began | Answer | GaveRows | m.Apply | m.Assigned | m.Drop | m.Snapshot | m.End
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
        answers: The steps that answer it.
        handed: The batches that it was given, by share.
        buffers: The buffers that it was given.
        placed: The positions that it was given, by generation.
        rows: The steps that answer its requests for rows.
        opened: What it was told at barriers, each with the step before which that was.
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
    answers: list[int] = field(default_factory=list)
    handed: dict[str, list[Handed]] = field(default_factory=dict)
    buffers: list[GaveBuffers] = field(default_factory=list)
    placed: dict[int, dict[str, Any]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    opened: list[tuple[int, Opened]] = field(default_factory=list)

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
        decided_at: And before which step.
        began: The creations of the variables, in order.
        passed_over: The steps that are not followed: answers that a worker whose connection was lost has not had, or has had twice.
    """

    steps: list[ReplayStep] = field(default_factory=list)
    lives: dict[LifeKey, ScriptedLife] = field(default_factory=dict)
    decided: dict[tuple[int, int, int], Decided] = field(default_factory=dict)
    decided_at: dict[tuple[int, int, int], int] = field(default_factory=dict)
    began: list[Began] = field(default_factory=list)
    passed_over: set[int] = field(default_factory=set)

    def life_of(self, message: Any) -> ScriptedLife:
        """Returns the life that has sent a message.

        Raises:
            ValueError: The record has no such life.
        """
        life = self.lives.get((message.worker, message.incarnation))
        if life is None:
            raise ValueError(f"the record has no such life of /job:worker/task:{message.worker}")
        return life

    def answers_of(self, life: ScriptedLife, generation: int | None = None) -> list[int]:
        """Returns the steps that answer a life, in one creation of the variables or in all."""
        found = []
        for number in life.answers:
            if number not in self.passed_over and generation in (None, self.steps[number].generation):
                found.append(number)
        return found

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
        """Returns the generations, and the places in them, from which later generations go on."""
        return {base for began in self.began if (base := self.base_of(began)) is not None}

    def base_of(self, began: Began) -> tuple[int, int] | None:
        """Returns the generation that made the variables from which another goes on, and its place; None for the chief's values."""
        while began.base >= 0:
            before = next((other for other in self.began if other.generation == began.base), None)
            if before is None or before.place != began.place or self.is_followed(before.generation):
                return began.base, began.place
            began = before  # of which nothing was used
        return None

    def places(self) -> Iterator[tuple[int, int]]:
        """Yields, of every step, the generation and how many updates there are after it."""
        place = 0
        for step in self.steps:
            if isinstance(step.item, Began):
                place = step.item.place
            elif isinstance(step.item, m.Apply | m.Assigned):
                place += 1
            yield step.generation, place

    def updates_between(self, after: tuple[int, int], last: tuple[int, int]) -> list[m.Apply]:
        """Returns the updates after one place, up to another one of the same generation."""
        return [
            step.item
            for step, place in zip(self.steps, self.places(), strict=True)
            if isinstance(step.item, m.Apply) and after < place <= last and place[0] == last[0]
        ]

    def began_of(self, generation: int) -> Began:
        """Returns how a generation began."""
        return next(began for began in self.began if began.generation == generation)

    def is_followed(self, generation: int) -> bool:
        """Whether a creation of the variables is made again."""
        numbers = (n for n, step in enumerate(self.steps) if isinstance(step.item, Began))
        return any(self.steps[n].generation == generation and n not in self.passed_over for n in numbers)

    def lost_at(self, life: ScriptedLife, generation: int) -> tuple[int, int] | None:
        """Returns when a life lost this creation of the variables, if it did.

        Returns:
            The last local step that it made here, and the one that was being pushed then, 0 if none was.
        """
        later = life.generations[life.generations.index(generation) + 1 :]
        if not later:
            return None
        lost = self._answer_at(self.answers_of(life, later[0])[0]).number
        if lost > 0:
            return lost - 1, lost
        firsts = (life.first_pushes[g] for g in later if g in life.first_pushes)
        return next(firsts, life.pushes.get(generation, 0) + 1) - 1, 0

    def _answer_at(self, number: int) -> Answer:
        item = self.steps[number].item
        assert isinstance(item, Answer)
        return item


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
                key = item.worker, item.incarnation, item.local_step
                self.script.decided[key], self.script.decided_at[key] = item, len(self.script.steps)
            case Answer():
                self._answer(item)
            case Handed():
                life = self.script.lives[item.worker, item.incarnation]
                life.handed.setdefault(item.share, []).append(item)
            case GaveBuffers():
                self.script.lives[item.worker, item.incarnation].buffers.append(item)
            case GaveRows():
                life = self.script.lives[item.worker, item.incarnation]
                life.last = max(life.last, len(self.script.steps))
                life.rows.append(len(self.script.steps))
                self._add(item)
            case Opened():
                life = self.script.lives[item.worker, item.incarnation]
                life.opened.append((len(self.script.steps), item))
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
        self.script.steps.append(ReplayStep(item, self._generation))

    def _life(self, item: Life) -> None:
        key = item.worker, item.incarnation
        if key not in self.script.lives:
            try:
                body = msgspec.msgpack.decode(item.body, type=LifeBody)
            except msgspec.DecodeError as error:
                raise RunRecordError(
                    f"/job:worker/task:{item.worker} was recorded by another release: {error}"
                ) from error
            self.script.lives[key] = ScriptedLife(item.worker, item.incarnation, body)

    def _answer(self, item: Answer) -> None:
        key = item.release.worker, item.release.incarnation
        life = self.script.lives.get(key)
        if life is None:
            raise RunRecordError(
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
        life.answers.append(life.last)
        self._add(item)


def read_script(folder: Path) -> Script:
    """Reads the record of a run's folder.

    Raises:
        RunRecordError: There is none, or it cannot be read or followed.
    """
    items: list[AnyItem] = []
    for frame in read_record(folder):
        try:
            items += decode_items(frame)
        except msgspec.DecodeError as error:
            raise RunRecordError(f"the record in {folder} was written by another release: {error}") from error
    return make_script(items, folder)


def make_script(items: Iterable[AnyItem], folder: Path) -> Script:
    """Makes a script of a record's items.

    Raises:
        RunRecordError: They cannot be followed.
    """
    reading = _Reading()
    for item in items:
        reading.take(item)
    script = reading.script
    if not script.steps:
        raise RunRecordError(f"the record in {folder} is empty: the run ended before its variables were created")
    if not isinstance(script.steps[0].item, Began):
        raise RunRecordError(f"the record in {folder} has no beginning")
    for life in script.lives.values():
        _pass_over_rows_asked_again(script, life)
        _pass_over_early_joins(script, life)
    for began in script.began[:-1]:
        _pass_over_vain_creation(script, began.generation)
    for life in script.lives.values():
        if life.worker != 0:  # the chief has created them, whatever came of that
            _pass_over_failed_recoveries(script, life)
        for generation in life.generations:
            _pass_over_reconnections(script, life, generation)
        _end_loop(script, life)
    return script


def _pass_over_early_joins(script: Script, life: ScriptedLife) -> None:
    """A worker that lost the ps tasks before its session began started over: it did nothing in between."""
    answers = script.answers_of(life)
    joins = [number for number in answers if _answer(script, number).kind == JOIN]
    last_first = max((number for number in joins if _answer(script, number).number < 0), default=-1)
    early = [number for number in answers if number < last_first]
    script.passed_over.update(early)
    for number in joins:  # an answer to what was being pushed then had not come
        lost = _answer(script, number).number
        same = script.steps[number].generation
        firsts = {script.steps[n].generation: n for n in reversed(joins)}.values()
        for n in answers:
            again = _answer(script, n).kind == JOIN and _answer(script, n).number == lost > 0 and n not in firsts
            if n < number and script.steps[n].generation != same and (again or _is_push(script, n, lost)):
                script.passed_over.add(n)
    life.generations = [g for g in life.generations if script.answers_of(life, g)]
    life.first = next(iter(script.answers_of(life)), -1)


def _pass_over_rows_asked_again(script: Script, life: ScriptedLife) -> None:
    """A worker that lost a connection while it waited for rows joined and asked for the same again: in a replay it asks once."""
    asked = sorted(life.answers + [number for number in life.rows if not _gave(script, number).ahead])
    for before, number in itertools.pairwise(asked):
        item = script.steps[number].item
        if not isinstance(item, Answer) or item.kind != JOIN or not isinstance(script.steps[before].item, GaveRows):
            continue
        after = next((n for n in asked if n > number and not _is_join(script, n)), None)
        if after is not None and script.steps[after].item == script.steps[before].item:
            script.passed_over.add(before)


def _gave(script: Script, number: int) -> GaveRows:
    item = script.steps[number].item
    assert isinstance(item, GaveRows)
    return item


def _is_join(script: Script, number: int) -> bool:
    item = script.steps[number].item
    return isinstance(item, Answer) and item.kind == JOIN


def _pass_over_vain_creation(script: Script, generation: int) -> None:
    """Variables that were lost before any worker had done anything with them: nobody joins them, and they are not created."""
    lives = [life for life in script.lives.values() if generation in life.generations]
    for life in lives:
        answers = script.answers_of(life)
        own = [n for n in answers if script.steps[n].generation == generation]
        after = next((n for n in answers if n > own[-1]), None)
        if len(own) > 1 or after is None or _answer(script, own[0]).number != _answer(script, after).number:
            return
    script.passed_over.update(n for n, step in enumerate(script.steps) if step.generation == generation)
    for life in lives:
        life.generations.remove(generation)
        life.first = script.answers_of(life)[0]


def _pass_over_failed_recoveries(script: Script, life: ScriptedLife) -> None:
    """A worker that joined new variables and lost those, too, before it went on: it joins the last ones only."""
    answers = script.answers_of(life)
    for number, following in itertools.pairwise(answers):
        item, after = _answer(script, number), _answer(script, following)
        generation = script.steps[number].generation
        if (
            item.kind == after.kind == JOIN
            and generation != script.steps[following].generation
            and item.number == after.number > 0
        ):
            script.passed_over.add(number)
            life.generations.remove(generation)


def _pass_over_reconnections(script: Script, life: ScriptedLife, generation: int) -> None:
    """A worker that lost a connection joined again: what it held after that is the answer to what it had asked.

    In a replay no connection is lost, so it asks once.
    """
    answers = script.answers_of(life, generation)
    for place, number in enumerate(answers):
        item = _answer(script, number)
        if item.kind != JOIN or place == 0:
            continue
        before, after = answers[:place], answers[place + 1 :]
        lost = item.number
        if lost > 0 and any(_is_push(script, n, lost) for n in after):
            # It was pushed again, and answered then.
            script.passed_over.add(number)
            script.passed_over.update(n for n in before if _is_push(script, n, lost))
            continue
        if lost > 0:
            # It was part of the run already, and the worker went on with what it was given when it joined.
            script.passed_over.update(n for n in before if _is_push(script, n, lost))
            found = script.decided.get((*life.key, lost))
            outcome = m.Outcome(found.accepted, found.reason, found.met) if found is not None else None
            script.steps[number].item = Answer(item.release, PUSH, lost, outcome)
            continue
        # Nothing was being pushed: it went on with what it was given when it joined, in place of what it held.
        held = next((n for n in reversed(before) if n not in script.passed_over), -1)
        if held < 0:
            continue
        script.passed_over.add(held)
        script.steps[number].item = msgspec.structs.replace(_answer(script, held), release=item.release)


def _answer(script: Script, number: int) -> Answer:
    item = script.steps[number].item
    assert isinstance(item, Answer)
    return item


def _is_push(script: Script, number: int, local_step: int) -> bool:
    item = _answer(script, number)
    return item.kind == PUSH and item.number == local_step


def _end_loop(script: Script, life: ScriptedLife) -> None:
    """A worker that left although its last answer did not end the run was asked to, or its loop was over: its last answer says so."""
    answers = script.answers_of(life)
    if life.how != LEFT or not answers:
        return
    step = script.steps[answers[-1]]
    if isinstance(step.item, Answer):
        release = msgspec.structs.replace(step.item.release, stop=True)
        step.item = msgspec.structs.replace(step.item, release=release)
