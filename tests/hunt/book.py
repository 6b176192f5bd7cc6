"""What must be true of a run, whatever befalls it: kept as the run goes, from what its parts do, and checked after every event.

The book knows what every gradient is (the program tells), what shard 0 decides and what each shard does about it (observed), and what
each worker is given. It makes the variables again in plain arithmetic. What always holds: the first thing that is not as it must be is
noted with the time, and ends the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.hunt.schedule import Config
from tests.hunt.world import World
from torchquorum.rules.quorum import Key
from torchquorum.server.run import Leading
from torchquorum.server.shard import Shard
from torchquorum.wire.messages import Apply, Create

SHAPES = {"a": 3, "b": 2, "c": 2}
NUMEL = sum(SHAPES.values())
START = np.arange(NUMEL, dtype=np.float64) * 8.0
Values = np.ndarray[Any, np.dtype[np.float64]]


def gradient(worker: int, position: int) -> Values:
    """Returns the gradient of a worker's batch: whole numbers, so that sums are exact; others of other batches."""
    step = worker * 7919 + position * 31
    return np.array([6.0 * ((step + 17 * i) % 61 + 1) for i in range(NUMEL)])


@dataclass
class Generation:
    """One creation of the variables.

    Attributes:
        parent: The generation it goes on from; None for none.
        base: The version at which it begins.
        values: The variables at each version.
        where: The gradients that count, each with the version that it is in.
        entries: The log, as the first shard that followed it saw it.
        version: The latest version.
        given: The latest version that a worker was given, as it said.
        saved: The latest version of which a checkpoint was published.
    """

    number: int
    parent: Generation | None
    base: int
    values: dict[int, Values] = field(default_factory=dict)
    where: dict[Key, int] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)
    version: int = 0
    given: int = 0
    saved: int = -1

    def at(self, version: int) -> Values | None:
        """Returns the variables at a version, of this generation or of one before it."""
        if version >= self.base or self.parent is None:
            return self.values.get(version)
        return self.parent.at(version)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.where = {key: version for key, version in self.parent.where.items() if version <= self.base}

    def goes_through(self, other: Generation, version: int) -> bool:
        """Whether a version of another generation is in this one's past."""
        if other is self:
            return True
        return self.parent is not None and (
            version <= self.base if other is self.parent else self.parent.goes_through(other, version)
        )


class Book:
    """The truth about one run.

    Attributes:
        broken: What is not as it must be; the first one counts.
        checks: How often each invariant was checked.
        round: Returns the gradients that wait for their round to be full.
        excuse: Why what was saved may be worse than promised, such as a flipped bit; empty if it may not.
    """

    def __init__(self, world: World, config: Config) -> None:
        self.world, self.config = world, config
        self.broken: list[str] = []
        self.checks: Counter[str] = Counter()
        self.gradients: dict[Key, Values] = {}
        self.generations: dict[int, Generation] = {}
        self.current: Generation | None = None
        self.excuse = ""
        self.round: Callable[[], Sequence[Key]] = tuple
        self._places: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}

    def check(self, invariant: str, holds: Any, what: str) -> None:
        """Counts a check, and notes the first that fails."""
        self.checks[invariant] += 1
        if not holds and not self.broken:
            self.broken.append(f"{invariant}: {what}")
            self.world.say(f"BROKEN: {invariant}: {what}")

    # -- the ps tasks -------------------------------------------------------------------------------------------------

    def created(self, create: Create, run: Any) -> None:
        """A ps has made its variables, new or from a checkpoint and a journal."""
        shard: Shard = run.shard
        number, version = create.generation, shard.version
        found = self.generations.get(number)
        if found is None:
            parent = self._parent_of(create)
            found = Generation(number, parent, version, version=version, given=version)
            known = START if create.restore is None else parent.at(version) if parent is not None else None
            self.check("restored as it was", known is not None, f"version {version} was never made, and is restored")
            if known is not None:
                found.values[version] = known
            self._check_nothing_lost(found, create)
            self.generations[number] = found
            how = f"from version {version}" if create.restore is not None else "anew"
            self.world.say(f"generation {len(self.generations)} begins {how}")
        self.check("shards agree", found.base == version, f"one shard restores {found.base}, another {version}")
        self._check_values(shard, found, version, "restored as it was")
        if isinstance(run, Leading):
            self.current = found

    def _parent_of(self, create: Create) -> Generation | None:
        if create.restore is None or create.journal is None:
            return None
        return self.generations.get(create.journal.after)

    def _check_nothing_lost(self, made: Generation, create: Create) -> None:
        """What was promised to survive has survived."""
        before = self.current
        if before is None or self.excuse:
            return
        self.check(
            "goes on from its own past",
            made.parent is None or before.goes_through(made.parent, made.base),
            f"version {made.base} of generation {made.parent and made.parent.number} is not in the past of the run",
        )
        if self.config.durable:
            at = f"restored at {made.base}, and a worker was given {before.given}"
            self.check("no acknowledged update is lost", made.base >= before.given, at)
        if self.config.folder:
            at = f"restored at {made.base}, and {before.saved} was saved"
            self.check("no saved version is lost", made.base >= before.saved, at)

    def followed(self, shard: Shard, entry: Any) -> None:
        """A shard has done what an entry of the log says."""
        generation, number = self.generations.get(shard.generation), shard.followed - 1
        if generation is None:
            return
        if number < len(generation.entries):
            same = generation.entries[number] == entry
            self.check(
                "shards agree", same, f"entry {number} is {generation.entries[number]} on one, {entry} on another"
            )
        else:
            self.check(
                "shards agree", number == len(generation.entries), f"entry {number} before {len(generation.entries)}"
            )
            generation.entries.append(entry)
            if isinstance(entry, Apply):
                self._apply(generation, entry)
        if isinstance(entry, Apply):
            self.check("versions follow", shard.version == entry.version, f"{shard.version} after {entry}")
            self._check_values(shard, generation, entry.version, "no update is lost or applied twice")

    def _apply(self, generation: Generation, entry: Apply) -> None:
        keys = [Key(*key) for key in entry.keys]
        self.check("versions follow", entry.version == generation.version + 1, f"{generation.version}, then {entry}")
        twice = [key for key in keys if key in generation.where]
        self.check("no update is lost or applied twice", not twice, f"{twice} are in version {entry.version} again")
        unknown = [key for key in keys if key not in self.gradients]
        self.check("no update is lost or applied twice", not unknown, f"{unknown} were never computed")
        before = generation.at(generation.version)
        if unknown or before is None:
            return
        total = sum(
            (self.gradients[key] for key in sorted(keys, key=lambda k: (k.worker, k.local_step))), np.zeros(NUMEL)
        )
        generation.where.update(dict.fromkeys(keys, entry.version))
        generation.values[entry.version] = before - total / len(keys)
        generation.version = entry.version

    def _check_values(self, shard: Shard, generation: Generation, version: int, invariant: str) -> None:
        expected = generation.at(version)
        if expected is None:
            return
        sections = shard.versions.slots.sections[shard.versions.current]
        for section, offset, at, numel in self._places_of(shard):
            found = sections[section][offset : offset + numel].numpy()
            same = np.array_equal(found, expected[at : at + numel])
            self.check(
                invariant, same, f"ps/{shard.index} holds {found} at version {version}, not {expected[at : at + numel]}"
            )

    def _places_of(self, shard: Shard) -> list[tuple[int, int, int, int]]:
        """Returns where a shard's pieces lie in its memory and in the vector of all variables."""
        key = shard.index, shard.plan.num_shards
        if key not in self._places:
            starts = np.cumsum([0, *SHAPES.values()])
            self._places[key] = [
                (k, piece.offset, int(starts[piece.variable]) + piece.start, piece.numel)
                for k, section in enumerate(shard.region.sections)
                for piece in section.pieces
            ]
        return self._places[key]

    def published(self, generation: int, step: int) -> None:
        """A checkpoint is complete."""
        if (found := self.generations.get(generation)) is not None:
            found.saved = max(found.saved, step)

    # -- the workers --------------------------------------------------------------------------------------------------

    def computed(self, key: Key, values: Values) -> None:
        """A worker has computed a gradient."""
        known = self.gradients.get(key)
        self.gradients[key] = values
        again = known is not None and not np.array_equal(known, values)  # the first was never pushed, or was given up
        counts = again and any(key in generation.where for generation in self.generations.values())
        self.check("a key is one gradient", not counts, f"{key} was another gradient before, which counts")

    def holds(self, who: str, values: Sequence[float], version: int, generation: int, before: tuple[int, int]) -> None:
        """A worker holds a version, after one of a generation before."""
        found = self.generations.get(generation)
        if found is None:
            return
        found.given = max(found.given, version)
        back = before[0] == generation and version < before[1]
        self.check("versions never go back", not back, f"{who} had {before[1]} and is given {version}")
        expected = found.at(version)
        self.check("a version exists", expected is not None, f"{who} was given version {version}, which was never made")
        if expected is not None:
            whole = np.array_equal(np.asarray(values), expected)
            self.check(
                "versions are whole", whole, f"{who} holds {list(values)} at version {version}, not {list(expected)}"
            )

    def answered(self, who: str, key: Key, accepted: bool | None, reason: str, version: int, generation: int) -> None:
        """A worker has heard what became of a gradient."""
        found = self.generations.get(generation)
        if found is None or accepted is None or reason in ("ps lost", "past last step"):
            return
        counts = key in found.where
        if accepted:
            waits = key in self.round()  # its worker was asked for more, as too few are there
            self.check(
                "an acknowledged update counts",
                counts or waits,
                f"{who}: {key} was accepted, and is not in version {version}",
            )
        elif not accepted:
            self.check(
                "a refused update does not count", not counts, f"{who}: {key} was refused ({reason}) and is applied"
            )
