"""How a run ends for the quorum: at its last step, by leaving, by a stop."""

from __future__ import annotations

import pytest

from tests.unit.rules.pushing import PRESETS, Run, applied, released, verdict
from torchquorum.rules import Async, Buffered, Sync
from torchquorum.rules.quorum import (
    Action,
    Applied,
    Discarded,
    Key,
    Reason,
    Refused,
    Released,
    Repeated,
)


@pytest.mark.parametrize("rule", PRESETS, ids=str)
def test_the_run_stops_exactly_at_its_last_step(rule):
    run = Run(rule, 3, last_step=3)
    updates = []
    for _ in range(30):
        for worker in run.computing():
            updates += applied(run.push(worker))
    assert [u.version for u in updates] == [1, 2, 3]
    assert run.quorum.version == 3 and run.quorum.stopped
    assert run.quorum.held == set() and run.quorum.round == []


@pytest.mark.parametrize("rule", PRESETS, ids=str)
def test_gradients_beyond_the_last_step_are_refused_and_their_workers_told_to_stop(rule):
    run = Run(rule, 1, last_step=1)
    actions: list[Action] = []
    while not run.quorum.stopped:
        actions = run.push(0)
    assert actions[-1] == Released(0, 1, run.steps[0], 1, True)
    run.join(1)
    actions = run.push(1)
    assert actions == [
        Refused(Key(1, 101, 1), 1, 1, Reason.PAST_LAST_STEP, 0.0),
        Released(1, 101, 1, 1, True),
    ]


@pytest.mark.parametrize("rule", PRESETS, ids=str)
@pytest.mark.parametrize("version", [5, 6])
def test_a_run_that_starts_at_its_last_step_stops_everyone_who_joins(rule, version):
    run = Run(rule, 2, joined=0, version=version, last_step=5)
    assert run.quorum.stopped
    assert run.join(0) == [Released(0, 1, 0, version, True)]
    assert verdict(run.push(0)) is Reason.PAST_LAST_STEP
    assert run.quorum.version == version


def test_the_last_update_releases_everyone_who_waits_with_stop():
    run = Run(Sync(), 3, last_step=1)
    run.push(0)
    run.push(1)
    assert [a.stop for a in run.push(2) if isinstance(a, Released)] == [True, True, True]


def test_a_worker_that_leaves_is_not_waited_for_and_what_it_gave_counts():
    run = Run(Sync(), 3)
    run.push(2)
    assert run.leave(2) == []
    run.push(0)
    assert applied(run.push(1)) == [Applied((Key(0, 1, 1), Key(1, 101, 1), Key(2, 201, 1)), 1)]


def test_leaving_releases_those_who_waited_for_it():
    run = Run(Sync(), 2)
    run.push(0)
    assert released(run.leave(1)) == [0]
    assert run.leave(1) == [] and run.quorum.leave(9, 9) == []


def test_a_worker_that_has_left_is_not_revived_by_late_messages():
    run = Run(Async(), 2)
    run.push(1)
    run.leave(1)
    run.seen(1)
    assert run.quorum.join(1, 101, 1.0) == []
    assert run.quorum.push(run.key(1), 0, 1.0) == [Repeated(run.key(1))]
    assert verdict(run.push(1)) is Reason.OLD_INCARNATION
    assert run.quorum.alive == [0]
    assert run.quorum.lost(1, 101, "its process ended") == []


def test_a_worker_that_has_left_may_come_back_as_a_new_incarnation():
    run = Run(Sync(), 2)
    run.leave(1)
    run.join(1)
    assert run.quorum.alive == [0, 1]


def test_stop_releases_everyone_who_waits_and_nothing_counts_any_more():
    run = Run(Sync(), 3)
    run.push(0)
    assert run.follow(run.quorum.stop()) == [Released(0, 1, 1, 0, True)]
    assert verdict(run.push(1)) is Reason.PAST_LAST_STEP
    assert verdict(run.push(2)) is Reason.PAST_LAST_STEP
    assert run.quorum.version == 0 and run.quorum.held == set()


def test_close_says_which_accepted_gradients_were_never_used():
    run = Run(Buffered(3), 2)
    run.push(1)
    run.push(0)
    run.quorum.stop()
    assert run.quorum.close() == [Discarded((Key(1, 101, 1), Key(0, 1, 1)))]
    assert run.quorum.close() == []


def test_close_of_a_run_that_used_everything_says_nothing():
    run = Run(Async(), 1)
    run.push(0)
    assert run.quorum.close() == []
