"""What became of the variables of one optimizer in one creation of them, in plain arithmetic; and the gradients of a program's batches.

The book has one of each generation and optimizer. What always holds: what was at a version is never changed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.hunt.arithmetic import State, Values, begin, follow, update
from tests.hunt.schedule import Config

MODELS: list[dict[str, int]] = [
    {"a": 3, "b": 2, "c": 2},
    {"d": 2, "e": 3},
]  # of each optimizer: parameters, and how many numbers


def parameters_of(config: Config, track: int) -> list[str]:
    """Returns the names of an optimizer's parameters, as a checkpoint has them."""
    return [f"model{track}.{name}" if config.second else name for name in MODELS[track]]


Rows = dict[int, Values]  # of an embedding, by id
NUM_ROWS, DIM = 12, 2


def first_rows() -> Rows:
    """Returns what the rows of the first optimizer's embedding are at first."""
    return {i: [16.0 * i + k for k in range(DIM)] for i in range(NUM_ROWS)}


def row_gradients(worker: int, position: int) -> Rows:
    """Returns the gradients of the rows that a worker's batch looks up."""
    step = worker * 7919 + position * 37
    ids = sorted({(step + 5 * k * k) % NUM_ROWS for k in range(3)})
    return {i: [6.0 * ((step + i + 11 * k) % 53 + 1) for k in range(DIM)] for i in ids}


def numel(track: int) -> int:
    """Returns how many numbers an optimizer has."""
    return sum(MODELS[track].values())


def start(track: int) -> Values:
    """Returns what an optimizer's variables are at first."""
    return [8.0 * (i + 100 * track) for i in range(numel(track))]


def gradient(worker: int, position: int, track: int = 0) -> Values:
    """Returns the gradient of a worker's batch: whole numbers, so that sums are exact; others of other batches."""
    step = worker * 7919 + position * 31 + track * 13
    return [6.0 * ((step + 17 * i) % 61 + 1) for i in range(numel(track))]


def assigned(worker: int) -> Values:
    """Returns what a worker writes to the first optimizer's parameters for `session.assign()`, always the same."""
    return [4.0 * ((worker * 31 + 5 * i) % 47) for i in range(numel(0))]


@dataclass
class Past:
    """The versions of one optimizer in one generation.

    Attributes:
        before: Those of the generation that this one goes on from.
        base: The version at which it begins.
        version: The latest.
        given: The latest that a worker was given, as it said.
        saved: The latest of which a checkpoint was published.
        values: The variables at each version.
        states: What the optimizer knows at each version.
        rows: The rows of its embedding at each version, where it has one.
    """

    before: Past | None
    base: int
    version: int
    given: int
    saved: int = -1
    values: dict[int, Values] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)

    @classmethod
    def begin(cls, track: int, version: int, before: Past | None, *, restored: bool) -> Past:
        """Returns that of variables which begin at a version."""
        past = cls(before, version, version, version)
        known = (before.at(version) if before is not None else None) if restored else start(track)
        state = (before.state_at(version) if before is not None else None) if restored else begin(start(track))
        if known is not None and state is not None:
            past.values[version], past.states[version] = known, state
        past.rows[version] = (before.rows_at(version) if before is not None else {}) if restored else first_rows()
        return past

    @property
    def is_known(self) -> bool:
        """Whether the version that it begins with was ever made."""
        return self.base in self.values

    def at(self, version: int) -> Values | None:
        """Returns the variables at a version, of this generation or of one before it."""
        if version >= self.base or self.before is None:
            return self.values.get(version)
        return self.before.at(version)

    def state_at(self, version: int) -> State | None:
        """Returns what the optimizer knows at a version, of this generation or of one before it."""
        if version >= self.base or self.before is None:
            return self.states.get(version)
        return self.before.state_at(version)

    def rows_at(self, version: int) -> Rows:
        """Returns the rows at a version; empty if that is not known."""
        if version >= self.base or self.before is None:
            return self.rows.get(version, {})
        return self.before.rows_at(version)

    def apply(
        self,
        optimizer: str,
        given: Sequence[Values],
        rows: Sequence[Rows],
        settings: Sequence[dict[str, Any]],
    ) -> None:
        """Makes the next version of the mean of some gradients, if the one before is known."""
        before, state = self.at(self.version), self.state_at(self.version)
        if before is None or state is None:
            return
        if settings and "lr" in settings[0]:
            state = replace(state, lr=settings[0]["lr"])
        mean = [sum(parts) / len(given) for parts in zip(*given, strict=True)]
        made = dict(self.rows_at(self.version))
        for i in sorted({i for one in rows for i in one}):
            total = [sum(parts) for parts in zip(*(one[i] for one in rows if i in one), strict=True)]
            made[i] = [r - state.lr * t / len(given) for r, t in zip(made[i], total, strict=True)]
        self.version += 1
        self.rows[self.version] = made
        self.values[self.version], self.states[self.version] = update(optimizer, before, mean, state)

    def put(self, values: Values) -> None:
        """Makes the next version of values that a program gave; but for the averages, what the optimizer knows stays."""
        state, rows = self.state_at(self.version), self.rows_at(self.version)
        self.version += 1
        self.rows[self.version] = rows
        self.values[self.version] = values
        if state is not None:
            self.states[self.version] = follow(state, values)
