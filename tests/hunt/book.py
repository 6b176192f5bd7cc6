"""What must be true of a run, whatever befalls it: kept as the run goes, from what its parts do, and checked after every event.

The book knows what every gradient is (the program tells), what shard 0 decides and what each shard does about it (observed), and what
each worker is given. It makes the variables again in plain arithmetic. What always holds: the first thing that is not as it must be is
noted with the time, and ends the run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hunt.arithmetic import Values, same
from tests.hunt.past import MODELS, Past, Rows, assigned, parameters_of
from tests.hunt.schedule import Config
from tests.hunt.world import World
from torchquorum.formats.checkpoint import CheckpointReader, verify
from torchquorum.formats.checkpoint_manifest import Manifest
from torchquorum.formats.journal import JournalError
from torchquorum.placement.layout import Region
from torchquorum.rules.quorum import Key
from torchquorum.server.leading import Leading
from torchquorum.server.shard import Shard
from torchquorum.server.shard_track import ShardTrack
from torchquorum.server.snapshot import SavedTrack
from torchquorum.wire.messages import Apply, Assigned, Create, End, Release


@dataclass
class Generation:
    """One creation of the variables.

    Attributes:
        parent: The generation it goes on from; None for none.
        pasts: What became of the variables of each optimizer.
        where: The gradients that count, each with its optimizer and the version that it is in.
        assigned: The assignments that were made, as (worker, incarnation, number).
        entries: The log, as the first shard that followed it saw it.
        failed: Whether a shard could not follow the log, which ends the job.
    """

    number: int
    parent: Generation | None
    pasts: list[Past]
    where: dict[Key, tuple[int, int]] = field(default_factory=dict)
    assigned: set[tuple[int, int, int]] = field(default_factory=set)
    entries: list[Any] = field(default_factory=list)
    failed: bool = False

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.where = {key: at for key, at in self.parent.where.items() if not self.is_new(*at)}

    def is_new(self, track: int, version: int) -> bool:
        """Whether a version of an optimizer was made in this generation."""
        return version > self.pasts[track].base

    @property
    def base(self) -> int:
        """Returns the version of the first optimizer at which it begins."""
        return self.pasts[0].base

    @property
    def version(self) -> int:
        """Returns the latest version of the first optimizer."""
        return self.pasts[0].version

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
        accepts_loss: Whether people let a durable run go back, as they must after more was lost than it can bear.
        excuse: Why what was saved may be worse than promised, such as a flipped bit; empty if it may not.
    """

    def __init__(self, world: World, config: Config) -> None:
        self.world, self.config = world, config
        self.broken: list[str] = []
        self.checks: Counter[str] = Counter()
        self.gradients: dict[Key, Values] = {}
        self.track_of: dict[Key, int] = {}
        self.row_gradients: dict[Key, Rows] = {}
        self.generations: dict[int, Generation] = {}
        self.current: Generation | None = None
        self.excuse = ""
        self.was_full = self.accepts_loss = False
        self.ended_at = 0.0
        self.heir: Book | None = None
        self.drawn: dict[int, int] = {}
        self._been: set[tuple[int, int]] = set()
        self._computing: set[tuple[int, int]] = set()
        self._late: set[tuple[int, int]] = set()
        self.positions: dict[tuple[int, int, int], int] = {}
        self.saved_positions: dict[tuple[int, int, int], int] = {}
        self.round: Callable[[], Sequence[Key] | None] = lambda: None
        self._places: dict[int, tuple[Region, list[tuple[int, int, int, int]]]] = {}

    def continued(self, world: World, config: Config) -> Book:
        """Returns the book of a run that goes on from this one's folder."""
        book = Book(world, config)
        book.gradients, book.generations, book.current = self.gradients, self.generations, self.current
        book.excuse, book.positions, book.was_full = self.excuse, self.positions, self.was_full
        book.accepts_loss, book.saved_positions = self.accepts_loss, self.saved_positions
        book.track_of, book.row_gradients = self.track_of, self.row_gradients
        return book

    def check(self, invariant: str, holds: Any, what: str, *parts: Any) -> None:
        """Counts a check, and notes the first that fails; `parts` go into the text then."""
        self.checks[invariant] += 1
        if not holds and not self.broken:
            what = what.format(*parts) if parts else what
            self.broken.append(f"{invariant}: {what}")
            self.world.say(f"BROKEN: {invariant}: {what}")

    # -- the ps tasks -------------------------------------------------------------------------------------------------

    def created(self, create: Create, run: Any) -> None:
        """A ps has made its variables, new or from a checkpoint and a journal."""
        shard: Shard = run.shard
        number, version = create.generation, shard.version
        found = self.generations.get(number)
        if found is None:
            parent, restored = self._parent_of(create), create.restore is not None
            before = parent.pasts if parent is not None else [None] * len(shard.tracks)
            pasts = [Past.begin(k, t.version, before[k], restored=restored) for k, t in enumerate(shard.tracks)]
            found = Generation(number, parent, pasts)
            for past in pasts:
                self.check("restored as it was", past.is_known, f"version {past.base} was never made, and is restored")
            self._check_nothing_lost(found, create)
            self.generations[number] = found
            how = f"from version {version}" if restored else "anew"
            self.world.say(f"generation {len(self.generations)} begins {how}")
        for past, track in zip(found.pasts, shard.tracks, strict=True):
            at = f"one shard restores {past.base}, another {track.version}"
            self.check("shards agree", past.base == track.version, at)
            self._check_values(track, found, "restored as it was")
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
        whose = self._owner(made)
        self.check(
            "goes on from its own past",
            made.parent is None or before.goes_through(whose, made.base),
            f"version {made.base} of generation {whose.number} is not in the past of the run",
        )
        for now, past in zip(made.pasts, before.pasts, strict=True):
            if self.config.durable:
                at = f"restored at {now.base}, and a worker was given {past.given}"
                self.check("no acknowledged update is lost", now.base >= past.given, at)
            if self.config.folder:
                at = f"restored at {now.base}, and {past.saved} was saved"
                self.check("no saved version is lost", now.base >= past.saved, at)

    def followed(self, shard: Shard, entry: Any) -> None:
        """A shard has done what an entry of the log says."""
        generation, number = self.generations.get(shard.generation), shard.followed - 1
        if generation is None:
            return
        if isinstance(entry, End):
            self.ended_at = self.world.now
        generation.failed |= shard.broken
        if generation.failed:  # of the log only its end is followed
            return
        if number < len(generation.entries):
            same = generation.entries[number] == entry
            self.check(
                "shards agree", same, "entry {} is {} on one, {} on another", number, generation.entries[number], entry
            )
        else:
            self.check(
                "shards agree", number == len(generation.entries), "entry {} before {}", number, len(generation.entries)
            )
            generation.entries.append(entry)
            if isinstance(entry, Apply | Assigned):
                self._change(generation, entry)
        if isinstance(entry, Release) and shard.index == 0:
            self._computing.add((entry.worker, entry.incarnation))
        if isinstance(entry, Apply | Assigned):
            track = shard.tracks[entry.track]
            self.check("versions follow", track.version == entry.version, "{} after {}", track.version, entry)
            self._check_values(track, generation, "no update is lost or applied twice")

    def could_not_follow(self, shard: Shard, entry: Any, error: BaseException) -> None:
        """An entry of the log was an error on a shard, which ends the job; what it asked for has not been made."""
        disk = isinstance(error, JournalError) or isinstance(error.__cause__, JournalError)
        self.check("only a disk stops the log", disk, "ps/{} cannot follow {}: {!r}", shard.index, entry, error)
        generation = self.generations.get(shard.generation)
        if generation is not None:
            generation.failed = True
            self.world.say(f"ps/{shard.index} cannot follow {type(entry).__name__}")

    def _change(self, generation: Generation, entry: Apply | Assigned) -> None:
        """The log says that a version is made: of gradients, or of what a worker assigned."""
        past = generation.pasts[entry.track]
        self.check("versions follow", entry.version == past.version + 1, "{}, then {}", past.version, entry)
        if isinstance(entry, Assigned):
            who = entry.worker, entry.incarnation, entry.number
            self.check("what is assigned counts once", who not in generation.assigned, "{} counts twice", who)
            generation.assigned.add(who)
            past.put(assigned(entry.worker))
            return
        keys = [Key(*key) for key in entry.keys]
        twice = [key for key in keys if key in generation.where or keys.count(key) > 1]
        self.check("no update is lost or applied twice", not twice, "{} are in version {} again", twice, entry.version)
        unknown = [key for key in keys if self.track_of.get(key) != entry.track]
        self.check("no update is lost or applied twice", not unknown, "{} were never computed", unknown)
        if not unknown:
            generation.where.update(dict.fromkeys(keys, (entry.track, entry.version)))
            given = [self.gradients[key] for key in sorted(keys, key=lambda k: (k.worker, k.local_step))]
            rows = [self.row_gradients[key] for key in keys if key in self.row_gradients]
            past.apply(self.config.optimizer, given, rows, entry.settings)

    def _check_values(self, track: ShardTrack, generation: Generation, invariant: str) -> None:
        """A shard's variables of an optimizer are what its version is made of."""
        expected, version = generation.pasts[track.index].at(track.version), track.version
        if expected is None:
            return
        sections = track.variables.versions.slots.sections[track.variables.versions.current]
        for section, offset, at, count in self._places_of(track):
            found, due = sections[section][offset : offset + count].tolist(), expected[at : at + count]
            same = self._same(found, due)
            self.check(invariant, same, "{} of {} at version {}, not {}", found, track.index, version, due)

    def _places_of(self, track: ShardTrack) -> list[tuple[int, int, int, int]]:
        """Returns where a shard's pieces lie in its memory and in the vector of all variables of an optimizer."""
        key = id(track.region)
        if key not in self._places:
            starts = [0, *itertools.accumulate(MODELS[track.index].values())]
            pieces = [
                (k, piece.offset, starts[piece.variable] + piece.start, piece.numel)
                for k, section in enumerate(track.region.sections)
                for piece in section.pieces
            ]
            self._places[key] = track.region, pieces  # with the region, so that its id stays its own
        return self._places[key][1]

    def published(self, manifest: Manifest, path: Path) -> None:
        """A checkpoint is complete."""
        found = self.generations.get(manifest.generation)
        if found is None:
            return
        if self.excuse and verify(path) is not None:
            return
        with CheckpointReader(path) as reader:
            for k, past in enumerate(found.pasts):
                step = SavedTrack.of(manifest, k).version
                past.saved = max(past.saved, step)
                expected, names = past.at(step), parameters_of(self.config, k)
                values = [value for name in names for value in reader.read("variable", name).tolist()]
                same = expected is not None and self._same(values, expected)
                self.check("checkpoints and variables agree", same, f"{path.name} holds {values}, not {expected}")
        for worker, body in manifest.workers.items() if self.config.in_step else ():
            if body.get("version") != manifest.step:
                continue
            where = int(worker), manifest.generation, manifest.step
            saved = self.saved_positions[where] = body["data"]["data"]["position"]
            stood = self.positions.get(where, saved)
            self.check(
                "positions are saved as they were", saved == stood, f"worker/{worker} stood at {stood}, not {saved}"
            )

    def joined(self, worker: int, incarnation: int) -> None:
        """A worker has joined, anew or again: it holds the current version."""
        self._late.discard((worker, incarnation))

    def died(self, worker: int, incarnation: int) -> None:
        """A worker counts as dead: what it is computing will be out of date."""
        if (worker, incarnation) in self._computing:
            self._late.add((worker, incarnation))

    def decided(self, key: Key, *, accepted: bool) -> None:
        """A gradient was accepted or refused."""
        who = key.worker, key.incarnation
        late = who in self._late
        self.check(
            "the dead are fenced", not (late and accepted), f"{key} was computed while its worker counted as dead"
        )
        self._late.discard(who)
        self._computing.discard(who)

    def lost_power(self) -> None:
        """All tasks have died at once, and what was not synced is gone: only what was synced was promised to survive."""
        if self.config.durable != "fsync":
            self.accepts_loss = True
            for generation in self.generations.values():
                for past in generation.pasts:
                    past.given = 0  # what a generation began with may have come from a journal, which is gone too

    # -- the workers --------------------------------------------------------------------------------------------------

    def computed(self, key: Key, values: Values, track: int, rows: Rows) -> None:
        """A worker has computed a gradient for an optimizer, and those of some rows."""
        known = self.gradients.get(key)
        if rows:
            self.row_gradients[key] = rows
        self.gradients[key], self.track_of[key] = values, track
        again = known is not None and known != values  # the first was never pushed, or was given up
        counts = again and any(key in generation.where for generation in self.generations.values())
        self.check("a key is one gradient", not counts, "{} was another gradient before, which counts", key)

    def holds(self, who: str, values: Values, track: int, now: tuple[int, int], before: tuple[int, int]) -> None:
        """A worker holds a version of an optimizer, after one before; each with its generation."""
        generation, version = now
        if generation not in self.generations:
            return
        found = self.generations[generation].pasts[track]
        found.given = max(found.given, version)
        back = before[0] == generation and version < before[1]
        self.check("versions never go back", not back, "{} had {} and is given {}", who, before[1], version)
        expected = found.at(version)
        self.check(
            "a version exists", expected is not None, "{} was given version {}, which was never made", who, version
        )
        if expected is not None:
            whole = self._same(values, expected)
            self.check("versions are whole", whole, "{} holds {} at version {}, not {}", who, values, version, expected)

    def looked_up(self, who: str, rows: Rows, generation: int, since: int) -> None:
        """A worker has looked rows up: they are of one version, not older than the one it held."""
        found = self.generations.get(generation)
        if found is None:
            return
        past = found.pasts[0]
        versions = range(max(since, past.base), past.version + 1)
        same = any(
            all(i in known and self._same(values, known[i]) for i, values in rows.items())
            for known in map(past.rows_at, versions)
        )
        at = f"{who} was given {rows}, which is not of a version from {versions.start} to {past.version}: {past.rows_at(past.version)}"
        self.check("rows are of one version", same, "{}", at)

    def averaged(self, who: str, values: Values, version: int, generation: int) -> None:
        """A worker was given the moving averages at a version."""
        found = self.generations.get(generation)
        state = found.pasts[0].state_at(version) if found is not None else None
        if state is not None:
            same = self._same(values, state.average)
            self.check("averages follow", same, "{} has {} at {}, not {}", who, values, version, state.average)

    def _same(self, found: Values, due: Values) -> bool:
        return same(found, due, exact=self.config.exact and not self.config.average)

    def stands(self, worker: int, generation: int, version: int, position: int) -> None:
        """A worker has first held a version at a place in its data; one that comes to another generation went back with its data."""
        self.positions.setdefault((worker, generation, version), position)
        found = self.generations.get(generation)
        if found is None or found.parent is None or (worker, generation) in self._been:
            return
        self._been.add((worker, generation))
        saved = self.saved_positions.get((worker, self._owner(found).number, found.base))
        if saved is not None:
            self.check(
                "workers go back with the run",
                position == saved,
                "worker/{} goes on at {} of its data, and {} was saved with version {}",
                worker,
                position,
                saved,
                found.base,
            )

    @staticmethod
    def _owner(made: Generation) -> Generation:
        """Returns the generation in which the version was made that another one begins with."""
        whose = made.parent or made
        while whose.parent is not None and made.base <= whose.base:
            whose = whose.parent  # which came to nothing, as a ps was lost while it was created
        return whose

    def answered(self, who: str, key: Key, accepted: bool | None, reason: str, version: int, generation: int) -> None:
        """A worker has heard what became of a gradient."""
        found = self.generations.get(generation)
        if found is None or accepted is None or reason in ("ps lost", "past last step"):
            return
        counts = key in found.where
        if accepted:
            round_now = (
                self.round()
            )  # its worker was asked for more, as too few are there; or ps 0 is gone, and the round too
            waits = found.failed or round_now is None or key in round_now
            self.check(
                "an acknowledged update counts",
                counts or waits,
                "{}: {} was accepted, and is not in version {}",
                who,
                key,
                version,
            )
        elif not accepted:
            self.check(
                "a refused update does not count", not counts, f"{who}: {key} was refused ({reason}) and is applied"
            )
