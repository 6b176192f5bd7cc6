"""Replays what TensorFlow's ConditionalAccumulator did (tests/golden/accumulator.npz) against the quorum.

The file drives the test: any scenario with the same columns can stand in it. A time step becomes the quorum's version, an
applied gradient a push computed at that version, a take of n the round of a quorum with `aggregate=n`. A round that the
rule does not keep is told apart by its rows, and docs/rules.md says why it is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchquorum.errors import ConfigError
from torchquorum.rules import Quorum, Rule, Sync
from torchquorum.rules.quorum import Accepted, Applied, Key, Reason, Refused

TESTS = Path(__file__).parents[2]
DOCUMENT = TESTS.parent / "docs" / "rules.md"
GOLDEN = np.load(TESTS / "golden" / "accumulator.npz", allow_pickle=False)
NAMES: list[str] = GOLDEN["names"].tolist()


class Op(IntEnum):
    SET = 0
    APPLY = 1
    TAKE = 2


class Difference(StrEnum):
    """Why a round is not kept; docs/rules.md has a paragraph for each."""

    MORE_THAN_N = "mean of more than n"
    SET_IN_ROUND = "time step set within a round"
    NOTHING_NEEDED = "n of 0 or less"


@dataclass(eq=False)
class Row:
    number: int
    op: Op
    arg: int
    time_step: int
    accepted: bool
    before: int
    timed_out: bool
    grad: np.ndarray
    result: np.ndarray


@dataclass
class Round:
    """The rows from one change of the time step to the next."""

    applies: list[Row] = field(default_factory=list)
    blocked: list[tuple[Row, int]] = field(default_factory=list)  # a take that got nothing, and after how many applies
    take: Row | None = None
    difference: Difference | None = None

    @property
    def version(self) -> int:
        return (self.applies[0] if self.applies else self.blocked[0][0]).time_step

    @property
    def label(self) -> str:
        rows = [*self.applies, *(row for row, _ in self.blocked), *([self.take] if self.take else [])]
        return f"rows {min(r.number for r in rows)}-{max(r.number for r in rows)}"


def read_rows(name: str) -> list[Row]:
    at = {str(title).partition("(")[0]: i for i, title in enumerate(GOLDEN["columns"])}
    table, grads, results = (GOLDEN[f"{name}/{part}"] for part in ("rows", "grad", "result"))
    return [
        Row(
            number=number,
            op=Op(int(row[at["op"]])),
            arg=int(row[at["arg"]]),
            time_step=int(row[at["time_step_before"]]),
            accepted=bool(row[at["accepted"]] == 1),
            before=int(row[at["num_accumulated_before"]]),
            timed_out=bool(row[at["timed_out"]]),
            grad=np.float32(grad) * GOLDEN["grad_vector"],
            result=result,
        )
        for number, (row, grad, result) in enumerate(zip(table, grads, results, strict=True))
    ]


def split(rows: list[Row]) -> Iterator[Round]:
    """Cuts a scenario into rounds and says of each whether the rule keeps it."""
    current = Round()
    for row in rows:
        if row.op is Op.APPLY:
            current.applies.append(row)
        elif row.op is Op.SET and row.before:
            current.difference = Difference.SET_IN_ROUND
        elif row.op is Op.TAKE and row.timed_out:
            current.blocked.append((row, len(current.applies)))
        else:
            if row.op is Op.TAKE:
                current.take = row
                if row.arg < 1:
                    current.difference = Difference.NOTHING_NEEDED
                elif row.before > row.arg and current.difference is None:
                    current.difference = Difference.MORE_THAN_N
            if current.applies or current.blocked:
                yield current
            current = Round()
    if current.applies or current.blocked:
        yield current


ROUNDS = [(name, round_) for name in NAMES for round_ in split(read_rows(name))]
KEPT = [(name, r) for name, r in ROUNDS if r.difference is None]
APPLIES = [(name, row) for name in NAMES for row in read_rows(name) if row.op is Op.APPLY]


def cases(rounds: list[tuple[str, Round]]) -> Any:
    return pytest.mark.parametrize("round_", [pytest.param(r, id=f"{name}, {r.label}") for name, r in rounds])


@dataclass
class Replay:
    """A quorum of `aggregate`, fed with the gradients of some rows by one worker or by a new worker each."""

    quorum: Quorum
    verdicts: list[Accepted | Refused] = field(default_factory=list)
    updates: list[Applied] = field(default_factory=list)
    rows: dict[Key, Row] = field(default_factory=dict)

    @classmethod
    def of(cls, applies: list[Row], version: int, aggregate: int, *, alone: bool = False) -> Replay:
        replay = cls(Quorum(Sync(aggregate=aggregate), aggregate, version=version))
        for number, row in enumerate(applies):
            key = Key(0, 1, number + 1) if alone else Key(number, 1, 1)
            replay.rows[key] = row
            replay.quorum.join(key.worker, key.incarnation, 0.0)
            actions = replay.quorum.push(key, row.arg, 0.0)
            replay.verdicts += [a for a in actions if isinstance(a, Accepted | Refused)]
            replay.updates += [a for a in actions if isinstance(a, Applied)]
        return replay

    def mean(self) -> np.ndarray:
        """The mean of the one update, as the accumulator computes it: a float32 sum in order, then one division."""
        (update,) = self.updates
        total = self.rows[update.keys[0]].grad.copy()
        for key in update.keys[1:]:
            total += self.rows[key].grad
        return total / np.float32(len(update.keys))


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{name}, row {row.number}") for name, row in APPLIES])
def test_a_gradient_is_accepted_exactly_when_tensorflow_accepts_it(row):
    replay = Replay.of([row], row.time_step, aggregate=2)
    (decision,) = replay.verdicts
    assert isinstance(decision, Accepted) is row.accepted
    assert decision.reason is (Reason.FRESH if row.accepted else Reason.STALE)


@pytest.mark.parametrize("alone", [False, True], ids=["a worker each", "one worker"])
@cases([(name, r) for name, r in KEPT if r.take])
def test_a_kept_round_makes_the_mean_that_tensorflow_took(round_, alone):
    take = round_.take
    replay = Replay.of(round_.applies, round_.version, take.arg, alone=alone)
    assert [isinstance(v, Accepted) for v in replay.verdicts[: len(round_.applies)]] == [
        row.accepted for row in round_.applies
    ]
    assert [update.version for update in replay.updates] == [take.time_step + 1]
    np.testing.assert_array_equal(replay.mean(), take.result)


@cases([(name, r) for name, r in ROUNDS if r.blocked and r.difference is not Difference.SET_IN_ROUND])
def test_where_a_take_would_block_the_round_stays_open(round_):
    for row, applied_before in round_.blocked:
        replay = Replay.of(round_.applies[:applied_before], row.time_step, row.arg)
        assert replay.updates == [] and replay.quorum.version == row.time_step
        assert len(replay.quorum.round) == row.before


@cases([(name, r) for name, r in ROUNDS if r.difference is Difference.MORE_THAN_N])
def test_of_more_than_n_gradients_the_first_n_make_the_update(round_):
    accepted = [row for row in round_.applies if row.accepted]
    n = round_.take.arg
    replay = Replay.of(round_.applies, round_.version, n)
    first = replay.updates[0]
    assert [replay.rows[key].number for key in first.keys] == [row.number for row in accepted[:n]]
    late = [v for v, row in zip(replay.verdicts, round_.applies, strict=True) if row in accepted[n:]]
    assert all(v.reason is (Reason.STALE if v.version < v.met else Reason.FRESH) for v in late)


@pytest.mark.parametrize("name", NAMES)
def test_the_versions_of_the_rounds_lead_to_tensorflows_final_time_step(name):
    taken = {
        r.take.number: Replay.of(r.applies, r.version, r.take.arg).quorum.version
        for kept_name, r in KEPT
        if kept_name == name and r.take
    }
    version = 0
    for row in read_rows(name):
        assert version == row.time_step
        if row.op is Op.SET:
            version = row.arg
        elif row.op is Op.TAKE and not row.timed_out:
            version = taken.get(row.number, version + 1)
    assert version == int(GOLDEN[f"{name}/final_time_step"])


def test_a_quorum_of_none_is_an_error_before_the_run_not_in_it():
    assert "must be positive, but was 0" in str(GOLDEN["take0_error"])
    with pytest.raises(ConfigError, match="aggregate=0: must be 1 or more"):
        Rule(aggregate=0)


def test_every_way_not_to_be_kept_has_its_reason_in_the_document():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [d.value for d in Difference if f"**{d.value}**" not in text] == []


def test_most_of_the_file_is_kept():
    assert len(KEPT) > len(ROUNDS) / 2
