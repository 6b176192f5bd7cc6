"""Rounds that stay open for a while although they have enough gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.rules.pushing import Run, applied, released
from torchquorum.errors import ConfigError
from torchquorum.rules import Async, Local, Rule, Sync, parse_rule
from torchquorum.rules.grace import LONGER, Grace
from torchquorum.rules.presets import read_rule
from torchquorum.rules.quorum import Accepted, Applied
from torchquorum.rules.times import StepTimes
from torchquorum.simulation.simulate import simulate


def workers_of(update: Applied) -> list[int]:
    return [key.worker for key in update.keys]


def test_a_round_with_enough_gradients_stays_open_for_its_grace():
    run = Run(Sync(2, grace=3.0), 4)
    run.quorum.liveness_s = 1e9
    run.now = 10.0
    assert applied(run.push(0)) == [] and applied(run.push(1)) == []
    run.now = 12.9
    assert run.expire() == []
    late = run.push(2)
    assert isinstance(late[0], Accepted) and applied(late) == []
    run.now = 13.0
    actions = run.expire()
    assert [workers_of(a) for a in applied(actions)] == [[0, 1, 2]]
    assert released(actions) == [0, 1, 2]


def test_it_closes_at_once_when_all_live_workers_have_given():
    run = Run(Sync(2, grace=3.0), 3)
    run.push(0)
    run.push(1)
    assert [workers_of(a) for a in applied(run.push(2))] == [[0, 1, 2]]


def test_the_next_round_has_a_grace_of_its_own():
    run = Run(Sync(1, grace=1.0), 2)
    run.quorum.liveness_s = 1e9
    run.push(0)
    run.now = 1.0
    assert applied(run.expire())
    run.now = 5.0
    assert applied(run.push(0)) == []
    run.now = 5.9
    assert applied(run.expire()) == []
    run.now = 6.0
    assert [workers_of(a) for a in applied(run.expire())] == [[0]]


def test_who_dies_is_not_waited_for():
    run = Run(Sync(1, grace=100.0), 2)
    assert applied(run.push(0)) == []
    assert [workers_of(a) for a in applied(run.lost(1))] == [[0]]


def test_a_gradient_after_the_grace_finds_the_round_closed_by_it():
    run = Run(Sync(1, grace=1.0), 3)
    run.push(0)
    run.now = 2.0
    assert [workers_of(a) for a in applied(run.push(1))] == [[0, 1]]


def test_no_grace_closes_at_once():
    run = Run(Sync(1, grace=0), 2)
    assert applied(run.push(0)) and run.quorum.tracks[0].grace is not None
    assert Run(Sync(1), 2).quorum.tracks[0].grace is None


def test_the_run_s_end_does_not_wait():
    run = Run(Sync(1, grace=9.0), 2)
    run.push(0)
    assert released(run.quorum.stop()) == [0]
    assert applied(run.expire()) == []


# -- auto -------------------------------------------------------------------------------------------------------------


def steady(run: Run, seconds: list[float], rounds: int) -> list[list[int]]:
    """Every worker takes as long for each step; returns who made each update."""
    run.quorum.liveness_s = 1e9
    updates: list[list[int]] = []
    begun = dict.fromkeys(range(len(seconds)), run.now)

    def follow(actions: list[Any]) -> None:
        updates.extend(map(workers_of, applied(actions)))
        for i in released(actions):
            begun[i] = run.now

    while len(updates) < rounds:
        grace = run.quorum.tracks[0].grace
        ready = min((begun[i] + s, i) for i, s in enumerate(seconds) if i not in run.quorum.held)
        if grace is not None and grace.until is not None and grace.until < ready[0]:
            run.now = grace.until
            follow(run.expire())
            continue
        run.now = ready[0]
        follow(run.push(ready[1]))
    return updates


def test_auto_waits_for_workers_that_are_a_little_slower_and_not_for_one_that_is_much_slower():
    run = Run(Sync(2, grace="auto"), 4)
    made = steady(run, [1.0, 1.0, 1.2, 9.0], 30)
    assert made[-5:] == [[0, 1, 2]] * 5


def test_auto_waits_for_nobody_of_whom_nothing_is_known():
    run = Run(Sync(1, grace="auto"), 2)
    run.now = 1.0
    assert applied(run.push(0))


def test_auto_keeps_a_round_open_a_little_longer_than_expected():
    grace = Grace(None)
    assert grace.times is not None
    grace.times.joins(1)
    for k in range(4):
        grace.times.begins(1, 10.0 * k)
        grace.times.ends(1, 10.0 * k + 2.0)
    grace.times.begins(1, 100.0)
    assert grace.holds(1, [1], 100.0, 101.5)
    assert grace.until == 101.5 + LONGER * 0.5
    assert not grace.is_over(102.0) and grace.is_over(101.5 + LONGER * 0.5)
    assert not grace.holds(1, [], 100.0, 101.6)
    grace.closed()
    assert grace.until is None and not grace.is_over(1e9)


def test_auto_does_not_wait_where_that_makes_fewer_gradients_a_second():
    grace = Grace(None)
    assert grace.times is not None
    grace.times.joins(1)
    for k in range(4):
        grace.times.begins(1, 20.0 * k)
        grace.times.ends(1, 20.0 * k + 9.0)
    grace.times.begins(1, 100.0)
    # One gradient after 1 s; two after 9 s would be fewer a second.
    assert not grace.holds(1, [1], 100.0, 101.0)


def test_how_long_a_step_still_takes():
    times = StepTimes()
    assert times.remaining(0, 0.0) is None
    times.joins(0)
    assert times.remaining(0, 0.0) is None
    for k, seconds in enumerate([5.0, 2.0, 4.0, 6.0]):  # the first does not count
        times.begins(0, 100.0 * k)
        times.ends(0, 100.0 * k + seconds)
    assert times.remaining(0, 400.0) is None
    times.begins(0, 400.0)
    assert times.remaining(0, 400.0) == 4.0
    assert times.remaining(0, 403.0) == 1.0 and times.remaining(0, 403.0, 0.95) == 3.0
    assert times.remaining(0, 406.0) == 6.0


# -- how it is given --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [Sync(2, grace="auto"), Sync(3, grace=1.5), Local(5, rule=Sync(2, grace=2.0))], ids=str
)
def test_it_has_a_text_and_is_read_as_it_is_shown(rule: Rule):
    assert parse_rule(rule.text) == rule and read_rule(str(rule)) == rule


def test_it_is_given_with_the_number():
    assert parse_rule("sync:2+1.5s") == parse_rule("sync:2of3+1.5", num_workers=3) == Sync(2, grace=1.5)
    assert Local(5, aggregate=2, grace="auto").grace == "auto"
    assert Sync(2).grace is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sync(2, grace=-1.0), "grace=-1.0: must be a number of seconds"),
        (lambda: Sync(2, grace=float("inf")), "grace=inf: must be a number of seconds"),
        (lambda: Sync(2, grace=True), "grace=True: must be a number of seconds"),
        (lambda: Sync(2, grace="soon"), "grace='soon': must be a number of seconds"),  # pyright: ignore[reportArgumentType]
        (lambda: Sync(grace=1.0), "grace=1.0: keeps a round open that has enough gradients"),
        (lambda: Sync("auto", grace=1.0), "grace=1.0: keeps a round open"),
        (lambda: Rule(aggregate=2, grace=1.0), "grace=1.0: keeps a round open"),
        (lambda: Local(5, rule=Async(), grace=1.0), "Local(rule=...) says when"),
        (lambda: parse_rule("sync:2+x"), "'x' is no number of seconds, nor auto"),
        (lambda: parse_rule("sync:2+"), "'' is no number of seconds"),
    ],
)
def test_what_a_grace_cannot_mean_is_an_error(make: Any, message: str):
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)


def test_a_simulated_run_with_a_grace_uses_what_would_have_been_refused():
    def refused(rule: str) -> float:
        found = simulate(workers=4, rule=rule, times="lognormal:0.1:0.1", updates=300, seed=1)
        return 1 - found.used / found.gradients

    assert refused("sync:3+auto") < 0.3 * refused("sync:3")


# -- what pays, in numbers --------------------------------------------------------------------------------------------


def of_one(*seconds: float) -> Grace:
    """A worker, number 1, whose steps have taken so long; the one that it computes began at 100."""
    grace = Grace(None)
    assert grace.times is not None
    grace.times.joins(1)
    for k, step in enumerate([1.0, *seconds]):
        grace.times.begins(1, 1000.0 * k - 9000.0)
        grace.times.ends(1, 1000.0 * k - 9000.0 + step)
    grace.times.begins(1, 100.0)
    return grace


@pytest.mark.parametrize(
    ("began_at", "now", "waits"),
    [
        (100.0, 101.0, False),  # one a second without it, and with it: it does not pay
        (99.5, 100.5, False),  # 1 in 1 s, or 2 in 2.5 s
        (101.5, 101.7, False),  # 1 in 0.2 s, or 2 in 0.5 s
        (101.5, 101.5, False),  # the round is full as it begins
        (99.0, 101.0, True),  # 1 in 2 s, or 2 in 3 s
    ],
)
def test_auto_waits_where_that_makes_more_gradients_a_second(began_at: float, now: float, waits: bool) -> None:
    grace = of_one(2.0, 2.0, 2.0)
    assert grace.holds(1, [1], began_at, now) is waits
    assert grace.until == pytest.approx(now + 1.1 * (102.0 - now) if waits else now)


def test_auto_waits_until_nearly_all_of_a_worker_s_steps_have_ended() -> None:
    grace = of_one(*[2.0] * 10, 2.2, 2.2, 2.2, 2.2, 2.2, 2.3)
    assert grace.holds(1, [1], 90.0, 100.0)
    assert grace.until == pytest.approx(100.0 + 1.1 * 2.3)
    grace = of_one(*[2.0] * 16)
    assert grace.times is not None
    grace.times.joins(2)
    for k in range(4):
        grace.times.begins(2, 50.0 + 10 * k)
        grace.times.ends(2, 50.0 + 10 * k + 2.0)
    assert not grace.holds(1, [2], 90.0, 100.0) and grace.until == 100.0  # it computes nothing now
    assert grace.holds(1, [], 90.0, 100.0) is False


def test_auto_waits_for_a_step_that_is_longer_than_all_for_as_long_again() -> None:
    grace = of_one(2.0, 2.0, 2.0)
    assert grace.holds(1, [1], 90.0, 103.0) and grace.until == pytest.approx(103.0 + 1.1 * 3.0)
    grace = of_one(0.0, 0.0, 0.0)
    assert not grace.holds(1, [1], 100.0, 100.0) and grace.until == 100.0
