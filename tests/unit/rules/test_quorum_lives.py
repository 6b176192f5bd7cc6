"""What the quorum does about workers that die, come back, freeze or wake, one behaviour a test."""

from __future__ import annotations

from itertools import product

import pytest

from tests.unit.rules.pushing import PRESETS, Run, applied, released, verdict
from torchquorum.rules import Async, Quorum, Sync
from torchquorum.rules.quorum import (
    LIVENESS_S,
    Applied,
    Died,
    Key,
    Reason,
    Refused,
    Released,
    Repeated,
    remembered_lives,
)

# -- deaths -----------------------------------------------------------------------------------------------------------


def test_a_death_while_computing_lets_the_others_go_on():
    run = Run(Sync(), 2)
    run.push(0)
    actions = run.lost(1)
    assert actions == [Died(1, 101, "its process ended"), Released(0, 1, 1, 0, False)]
    assert applied(run.push(0)) == [Applied((Key(0, 1, 1), Key(0, 1, 2)), 1)]


def test_a_gradient_given_by_a_worker_that_then_died_still_counts():
    run = Run(Sync(), 2)
    run.push(1)
    run.lost(1)
    assert applied(run.push(0)) == [Applied((Key(0, 1, 1), Key(1, 101, 1)), 1)]


def test_several_deaths_leave_a_run_that_goes_on():
    run = Run(Sync(), 5)
    run.push(0)
    run.push(3)
    for worker in (1, 2, 4, 3):
        run.lost(worker)
    for _ in range(3):
        run.push(0)
    assert run.quorum.version == 1 and run.quorum.live == 1


def test_deaths_at_the_same_moment_ask_the_survivor_only_for_what_is_missing():
    run = Run(Sync(), 4)
    run.push(0)
    run.push(1)
    run.now = 6.0
    run.seen(0)
    run.seen(1)
    actions = run.expire()
    assert [a.worker for a in actions if isinstance(a, Died)] == [2, 3]
    assert released(actions) == [0, 1]


def test_a_worker_not_heard_of_for_longer_than_the_liveness_time_is_declared_dead():
    run = Run(Async(), 2)
    run.now = 5.0
    assert run.expire() == []
    run.seen(0)
    run.now = 5.5
    assert run.expire() == [Died(1, 101, "not heard of for 5.5 s")]
    assert run.quorum.alive == [0]
    assert run.expire() == []


def test_a_push_is_a_sign_of_life():
    run = Run(Async(), 1)
    run.now = 4.0
    run.push(0)
    run.now = 8.0
    assert run.expire() == []


def test_a_death_is_said_once():
    run = Run(Sync(), 2)
    assert len(run.lost(0)) == 1
    assert run.lost(0) == []
    assert run.quorum.lost(7, 1, "never joined") == []


def test_a_death_of_an_old_incarnation_does_not_touch_the_new_one():
    run = Run(Sync(), 2)
    run.join(1)
    assert run.quorum.lost(1, 101, "its process ended") == []
    assert run.quorum.live == 2


@pytest.mark.parametrize(("rule", "held"), list(product(PRESETS, [(), (0,), (1,), (0, 1), (0, 0), (2, 1)])), ids=str)
def test_nobody_waits_for_ever_after_any_single_death(rule, held):
    for victim in range(3):
        run = Run(rule, 3)
        for worker in held:
            if worker in run.computing():
                run.push(worker)
        run.lost(victim)
        before = run.quorum.version
        for _ in range(8):
            computing = run.computing()
            assert computing, f"{victim} died and {run.quorum.held} wait"
            for worker in computing:
                run.push(worker)
        assert run.quorum.version > before


# -- coming back ------------------------------------------------------------------------------------------------------


def test_a_worker_comes_back_with_a_new_incarnation_and_counts_again():
    run = Run(Sync(), 2)
    run.lost(1)
    assert run.join(1) == [Released(1, 102, 0, 0, False)]
    run.push(0)
    assert applied(run.push(1)) == [Applied((Key(0, 1, 1), Key(1, 102, 1)), 1)]


def test_a_new_incarnation_replaces_one_that_still_counts_as_alive():
    run = Run(Sync(), 2)
    run.join(1)
    assert run.quorum.live == 2
    assert run.quorum.workers[1].incarnation == 102


def test_a_worker_that_gave_died_and_came_back_counts_once_in_the_round():
    run = Run(Sync(), 2)
    run.push(1)
    run.join(1)
    assert verdict(run.push(1)) is Reason.ALREADY_IN_ROUND
    assert applied(run.push(0)) == [Applied((Key(0, 1, 1), Key(1, 101, 1)), 1)]
    assert run.computing() == [0, 1]


def test_a_push_from_an_old_incarnation_is_refused():
    run = Run(Sync(), 2)
    run.join(1)
    old = Key(1, 101, 1)
    assert run.quorum.push(old, 0, 0.0) == [Refused(old, 0, 0, Reason.OLD_INCARNATION, 0.0)]
    assert run.quorum.round == []


def test_a_push_from_an_old_incarnation_is_refused_only_once():
    run = Run(Sync(), 2)
    run.join(1)
    run.quorum.push(Key(1, 101, 1), 0, 0.0)
    assert run.quorum.push(Key(1, 101, 1), 0, 0.0) == [Repeated(Key(1, 101, 1))]
    assert verdict(run.quorum.push(Key(1, 101, 2), 0, 0.0)) is Reason.OLD_INCARNATION


def test_an_accepted_gradient_that_comes_again_after_its_worker_was_replaced_is_not_refused_as_well():
    run = Run(Sync(), 2)
    run.push(1)
    run.join(1)
    assert run.quorum.push(Key(1, 101, 1), 0, 0.0) == [Repeated(Key(1, 101, 1))]
    assert run.quorum.round == [Key(1, 101, 1)]


def test_a_push_from_somebody_who_never_joined_is_refused():
    run = Run(Async(), 2)
    for _ in range(2):  # it is not remembered: the sender is told to join, and may then send it again
        assert verdict(run.quorum.push(Key(7, 9, 1), 0, 0.0)) is Reason.OLD_INCARNATION
    run.quorum.join(7, 9, 0.0)
    assert verdict(run.quorum.push(Key(7, 9, 1), 0, 0.0)) is Reason.FRESH


def test_a_late_join_of_an_old_incarnation_does_not_replace_the_new_one():
    run = Run(Sync(), 2)
    run.join(1)
    assert run.quorum.join(1, 101, 0.0) == []
    assert run.quorum.workers[1].incarnation == 102


def test_a_sign_of_life_of_an_old_incarnation_does_not_revive_the_new_one():
    run = Run(Sync(), 2)
    run.join(1)
    run.lost(1)
    run.quorum.seen(1, 101, 1.0)
    assert run.quorum.alive == [0]


def test_joining_again_repeats_the_release():
    run = Run(Async(), 2)
    run.push(0)
    assert run.quorum.join(1, 101, 1.0) == [Released(1, 101, 0, 1, False)]
    assert run.quorum.live == 2


def test_joining_again_while_held_changes_nothing():
    run = Run(Sync(), 2)
    run.push(0)
    assert run.quorum.join(0, 1, 1.0) == []
    assert run.quorum.held == {0}


# -- frozen and revived -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", PRESETS, ids=str)
def test_what_a_frozen_worker_was_computing_is_refused_as_expired_when_it_wakes(rule):
    run = Run(rule, 2)
    run.lost(1)
    run.seen(1)
    assert run.quorum.alive == [0, 1]
    assert verdict(run.push(1)) is Reason.EXPIRED


def test_a_revived_worker_is_released_at_once_and_its_next_gradient_counts():
    run = Run(Sync(), 2)
    run.lost(1)
    assert released(run.push(1)) == [1]
    assert verdict(run.push(1)) is Reason.FRESH
    assert run.quorum.live == 2


def test_a_worker_that_froze_while_it_waited_has_nothing_to_be_refused():
    run = Run(Sync(aggregate=2), 3)
    run.push(2)
    run.lost(2)
    assert released(run.push(0)) == [0, 2]
    assert verdict(run.push(2)) is Reason.FRESH


def test_a_worker_that_joins_again_after_its_death_starts_afresh():
    run = Run(Sync(), 2)
    run.lost(1)
    run.follow(run.quorum.join(1, 101, 0.0))
    assert verdict(run.push(1)) is Reason.FRESH


def test_a_worker_revived_alone_while_it_waits_does_not_wait_for_the_dead():
    run = Run(Sync(), 2)
    run.push(0)
    run.now = 6.0
    run.expire()
    assert run.quorum.live == 0
    run.seen(0)
    assert released(run.expire()) == [0]
    assert applied(run.push(0))


def test_a_revived_worker_turns_the_second_gradient_of_another_into_one_too_many():
    run = Run(Sync(), 2)
    run.push(0)
    run.lost(1)
    run.seen(1)
    assert verdict(run.push(0)) is Reason.ALREADY_IN_ROUND
    assert verdict(run.push(1)) is Reason.EXPIRED
    assert [key.worker for key in applied(run.push(1))[0].keys] == [0, 1]


def test_joining_again_is_a_sign_of_life_and_revives_the_dead():
    run = Run(Sync(), 2)
    run.lost(1)
    assert run.quorum.join(1, 101, 3.0) == [Released(1, 101, 0, 0, False)]
    assert run.quorum.alive == [0, 1]
    run.quorum.join(1, 101, 4.0)
    assert [a.worker for a in run.quorum.expire(LIVENESS_S + 3.5) if isinstance(a, Died)] == [0]


@pytest.mark.parametrize(("num_workers", "lives"), [(1, 1024), (256, 1024), (257, 1028), (1000, 4000)])
def test_a_run_of_weeks_remembers_so_many_earlier_lives_and_the_oldest_go_first(num_workers, lives):
    assert remembered_lives(num_workers) == lives
    quorum = Quorum(Async(), num_workers)
    for life in range(lives + 2):  # all but the last one are earlier ones
        quorum.join(0, life, 0.0)
    assert list(quorum.replaced) == [(0, life) for life in range(1, lives + 1)]
    assert quorum.join(0, 1, 0.0) == [] and quorum.join(0, 0, 0.0) != []  # who is forgotten is a stranger


def test_somebody_is_silent_exactly_when_expire_would_do_something():
    run = Run(Sync(), 2)
    assert not run.quorum.somebody_silent(LIVENESS_S)
    assert run.quorum.somebody_silent(LIVENESS_S + 0.001)
    run.now = 6.0
    run.expire()
    assert not run.quorum.somebody_silent(100.0)  # the dead do not die again
    run.seen(1)
    assert run.quorum.somebody_silent(6.0)  # somebody came back, and nothing has followed
    run.expire()
    assert not run.quorum.somebody_silent(6.0)
