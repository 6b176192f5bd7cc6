"""What the quorum decides about gradients, one behaviour a test. Workers push by hand here; the property tests let them loose."""

from __future__ import annotations

import pytest

from tests.unit.rules.pushing import PRESETS, Run, applied, released, verdict
from torchquorum.rules import Async, Bounded, Buffered, Quorum, Rule, Sync
from torchquorum.rules.quorum import (
    Accepted,
    Applied,
    Key,
    Reason,
    Refused,
    Released,
    Repeated,
    Wait,
)

# -- async ------------------------------------------------------------------------------------------------------------


def test_in_async_every_gradient_is_an_update_and_its_worker_goes_on_with_it():
    run = Run(Async(), 2)
    assert run.push(0) == [
        Accepted(Key(0, 1, 1), 0, 0, Reason.FRESH, 0.0),
        Applied((Key(0, 1, 1),), 1),
        Released(0, 1, 1, 1, False),
    ]


def test_in_async_a_gradient_of_any_staleness_is_accepted():
    run = Run(Async(), 2)
    for _ in range(50):
        run.push(0)
    actions = run.push(1)
    assert actions[0] == Accepted(Key(1, 101, 1), 0, 50, Reason.WITHIN_BOUND, 0.0)
    assert run.quorum.version == 51


def test_in_async_nobody_is_ever_held():
    run = Run(Async(), 3)
    for worker in (0, 0, 1, 0, 2, 2):
        assert released(run.push(worker)) == [worker]
        assert run.quorum.held == set()


def test_buffered_applies_every_k_gradients_whoever_sent_them():
    run = Run(Buffered(3), 2)
    assert applied(run.push(0)) == applied(run.push(0)) == []
    assert applied(run.push(1)) == [Applied((Key(0, 1, 1), Key(0, 1, 2), Key(1, 101, 1)), 1)]


def test_buffered_holds_nobody_between_updates():
    run = Run(Buffered(3), 2)
    assert released(run.push(0)) == [0]
    assert run.at[0] == 0


# -- staleness --------------------------------------------------------------------------------------------------------


def test_a_stale_gradient_is_refused_and_its_worker_released_at_once_with_the_new_version():
    run = Run(Sync(aggregate=2), 3)
    run.push(0)
    run.push(1)
    assert run.push(2) == [Refused(Key(2, 201, 1), 0, 1, Reason.STALE, 0.0), Released(2, 201, 1, 1, False)]
    assert verdict(run.push(2)) is Reason.FRESH


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_staleness_up_to_the_bound_is_accepted_and_one_more_is_refused(bound):
    run = Run(Rule(aggregate=1, max_staleness=bound), 3)
    for _ in range(bound):
        run.push(0)
    assert verdict(run.push(1)) is (Reason.WITHIN_BOUND if bound else Reason.FRESH)
    assert run.quorum.version == bound + 1
    assert verdict(run.push(2)) is Reason.STALE
    assert run.quorum.version == bound + 1


def test_a_gradient_from_a_later_version_is_accepted_as_fresh():
    quorum = Quorum(Sync(aggregate=1), 1, version=3)
    quorum.join(0, 1, 0.0)
    assert verdict(quorum.push(Key(0, 1, 1), 5, 0.0)) is Reason.FRESH


@pytest.mark.parametrize("rule", PRESETS, ids=str)
def test_a_gradient_that_is_not_finite_is_refused_and_its_worker_may_try_again(rule):
    run = Run(rule, 1)
    actions = run.push(0, finite=False)
    assert verdict(actions) is Reason.NOT_FINITE
    assert released(actions) == [0]
    assert run.quorum.version == 0 and run.quorum.round == []


# -- sync rounds ------------------------------------------------------------------------------------------------------


def test_a_sync_round_closes_when_every_worker_has_given_one_gradient():
    run = Run(Sync(), 3)
    assert released(run.push(2)) == released(run.push(0)) == []
    actions = run.push(1)
    assert applied(actions) == [Applied((Key(0, 1, 1), Key(1, 101, 1), Key(2, 201, 1)), 1)]
    assert released(actions) == [0, 1, 2]
    assert set(run.at.values()) == {1}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_of_arrival_does_not_change_the_order_of_the_mean(order):
    run = Run(Sync(), 3)
    (update,) = [a for worker in order for a in applied(run.push(worker))]
    assert [key.worker for key in update.keys] == [0, 1, 2]


def test_in_a_sync_round_with_everyone_alive_a_second_gradient_of_a_worker_does_not_count():
    run = Run(Sync(), 2)
    run.push(0)
    actions = run.push(0)
    assert verdict(actions) is Reason.ALREADY_IN_ROUND
    assert released(actions) == [] and run.quorum.round == [Key(0, 1, 1)]


def test_backup_workers_close_the_round_without_the_slowest():
    run = Run(Sync(aggregate=2), 3)
    run.push(2)
    actions = run.push(0)
    assert [key.worker for key in applied(actions)[0].keys] == [0, 2]
    assert released(actions) == [0, 2]
    assert run.computing() == [0, 1, 2]


def test_a_fast_worker_does_not_take_the_place_of_a_backup_worker():
    run = Run(Sync(aggregate=2), 3)
    for _ in range(3):
        run.push(0)
    assert run.quorum.version == 0
    assert applied(run.push(2))


# -- fewer workers than the quorum ------------------------------------------------------------------------------------


def test_a_lone_worker_fills_the_quorum_with_two_gradients_of_its_own():
    run = Run(Sync(aggregate=2), 2, joined=1)
    assert released(run.push(0)) == [0]
    actions = run.push(0)
    assert applied(actions) == [Applied((Key(0, 1, 1), Key(0, 1, 2)), 1)]
    assert released(actions) == [0]
    for _ in range(8):
        run.push(0)
    assert run.quorum.version == 5 and run.steps[0] == 10


def test_the_moment_a_second_worker_joins_both_count_once():
    run = Run(Sync(aggregate=2), 2, joined=1)
    run.push(0)
    run.join(1)
    assert verdict(run.push(0)) is Reason.ALREADY_IN_ROUND
    actions = run.push(1)
    assert [key.worker for key in applied(actions)[0].keys] == [0, 1]
    assert released(actions) == [0, 1]


def test_sync_without_a_number_is_filled_by_a_lone_worker_too():
    run = Run(Sync(), 3, joined=1)
    for _ in range(6):
        assert released(run.push(0)) == [0]
    assert run.quorum.version == 2


def test_an_aggregate_above_the_number_of_workers_asks_each_for_several():
    run = Run(Sync(aggregate=5), 2)
    given = []
    while not run.quorum.version:
        for worker in run.computing():
            given += [worker] if verdict(run.push(worker)) is Reason.FRESH else []
    assert sorted(given) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def test_no_more_gradients_are_asked_for_than_the_round_wants():
    run = Run(Sync(aggregate=3), 2)
    assert released(run.push(0)) == [0]
    assert released(run.push(1)) == []
    assert run.computing() == [0]


def test_who_gave_least_is_asked_again():
    run = Run(Sync(aggregate=4), 3)
    assert released(run.push(2)) == [2]  # gives a second one at once
    assert released(run.push(2)) == []
    run.push(1)
    run.lost(0)
    assert run.computing() == [1]


# -- duplicates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", PRESETS, ids=str)
def test_a_gradient_that_arrives_twice_counts_once(rule):
    run = Run(rule, 2)
    run.push(0)
    version, pending = run.quorum.version, list(run.quorum.round)
    assert run.quorum.push(run.key(0), 0, 0.0) == [Repeated(run.key(0))]
    assert (run.quorum.version, run.quorum.round) == (version, pending)


def test_an_earlier_gradient_that_arrives_again_later_is_repeated():
    run = Run(Async(), 1)
    for _ in range(3):
        run.push(0)
    assert run.quorum.push(Key(0, 1, 1), 0, 0.0) == [Repeated(Key(0, 1, 1))]


def test_a_refused_gradient_that_arrives_again_is_not_judged_anew():
    run = Run(Sync(aggregate=1), 2)
    run.push(0)
    assert verdict(run.push(1)) is Reason.STALE
    assert run.quorum.push(run.key(1), 1, 0.0) == [Repeated(run.key(1))]


# -- max_lead ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lead", [0, 1, 3])
def test_a_worker_more_than_max_lead_ahead_waits_for_the_slowest(max_lead):
    run = Run(Bounded(max_lead), 2)
    for _ in range(max_lead):
        assert released(run.push(0)) == [0]
    actions = run.push(0)
    assert verdict(actions) in (Reason.FRESH, Reason.WITHIN_BOUND) and applied(actions)
    assert released(actions) == []
    assert released(run.push(1)) == [0, 1]


def test_a_late_joiner_does_not_make_the_others_wait_for_history():
    run = Run(Bounded(1), 2, joined=1)
    for _ in range(40):
        run.push(0)
    run.join(1)
    assert released(run.push(0)) == [0]
    assert released(run.push(0)) == []
    assert released(run.push(1)) == [0, 1]


def test_a_revived_worker_does_not_make_the_others_wait_for_history():
    run = Run(Bounded(1), 2)
    run.lost(1)
    for _ in range(40):
        run.push(0)
    run.seen(1)
    assert released(run.push(0)) == [0]


def test_a_newcomer_to_a_run_of_the_dead_does_not_make_them_wait_for_history():
    run = Run(Bounded(1), 2, joined=1)
    for _ in range(40):
        run.push(0)
    run.lost(0)
    run.join(1)
    run.seen(0)
    assert verdict(run.push(0)) is Reason.EXPIRED
    assert 0 not in run.quorum.held


def test_the_death_of_the_slowest_releases_those_who_waited_for_it():
    run = Run(Bounded(0), 3)
    run.push(0)
    run.push(1)
    assert run.quorum.held == {0, 1}
    assert released(run.lost(2)) == [0, 1]


def test_a_refused_gradient_is_a_local_step_all_the_same():
    run = Run(Bounded(0), 2)
    run.push(0, finite=False)
    assert run.quorum.held == {0}
    assert released(run.push(1)) == [0, 1]


def test_those_too_far_ahead_go_on_when_everyone_behind_them_has_been_counted():
    run = Run(Rule(aggregate=5, max_staleness=0, max_lead=0), 5, joined=2)
    for _ in range(4):
        run.push(0)  # asked again and again, while the other one is slow
    for worker in (2, 3, 4):
        run.join(worker)
    assert applied(run.push(1))
    for worker in (2, 3, 4):
        assert verdict(run.push(worker)) is Reason.STALE
    assert run.quorum.held == {0}
    for worker in (1, 2, 3):
        assert released(run.push(worker)) == []
    assert released(run.push(4)) == [0]
    assert applied(run.push(0))


# -- what people ask --------------------------------------------------------------------------------------------------


def test_a_worker_that_computes_waits_for_nothing():
    run = Run(Sync(), 2)
    assert run.quorum.waits_for(0) is None
    assert run.quorum.waits_for(9) is None


def test_a_held_worker_waits_for_the_quorum_and_says_who_is_missing():
    run = Run(Sync(), 4)
    run.push(0)
    run.push(2)
    assert run.quorum.waits_for(0) == Wait("the quorum", 2, 4, (1, 3))


def test_the_dead_are_not_among_those_waited_for():
    run = Run(Sync(aggregate=2), 3)
    run.push(0)
    run.lost(1)
    assert run.quorum.waits_for(0) == Wait("the quorum", 1, 2, (2,))


def test_who_was_asked_for_a_second_gradient_is_among_those_waited_for():
    run = Run(Sync(aggregate=3), 2)
    run.push(0)
    run.push(1)
    assert run.quorum.waits_for(1) == Wait("the quorum", 2, 3, (0,))


def test_a_worker_too_far_ahead_waits_for_the_slowest_and_says_by_how_much():
    run = Run(Bounded(1), 3)
    run.push(0)
    run.push(0)
    run.push(1)
    assert run.quorum.waits_for(0) == Wait("the slowest worker", 2, 1, (2,))


def test_needed_is_the_rules_number_for_this_cluster():
    assert Quorum(Sync(), 3).needed == 3
    assert Quorum(Sync(aggregate=2), 3).needed == 2
    assert Quorum(Async(), 3).needed == 1


def test_a_wait_is_shown_with_at_most_eight_of_those_who_are_missing():
    shown = Wait("the quorum", 1, 10, tuple(range(9))).to_dict()
    assert shown == {"what": "the quorum", "have": 1, "need": 10, "missing": list(range(8)), "count": 9}


def test_a_new_quorum_is_at_version_0_and_nobody_is_silent_in_it():
    quorum = Quorum(Async(), 2)
    assert (quorum.version, quorum.live, quorum.idle, quorum.stopped) == (0, 0, 0, False)
    assert not quorum.somebody_silent(1e9) and quorum.expire(1e9) == []


def test_the_reasons_are_the_words_that_stand_in_the_ledger():
    assert {reason.name: str(reason) for reason in Reason} == {
        "FRESH": "fresh",
        "WITHIN_BOUND": "within bound",
        "STALE": "stale",
        "ALREADY_IN_ROUND": "already in round",
        "PAST_LAST_STEP": "past last step",
        "OLD_INCARNATION": "old incarnation",
        "EXPIRED": "expired",
        "NOT_FINITE": "not finite",
    }


@pytest.mark.parametrize("least", [0, 1])
def test_whoever_gave_least_is_asked_again_wherever_it_stands_in_the_order(least):
    run, most = Run(Sync(aggregate=4), 3), 1 - least
    run.push(most)
    run.push(most)
    run.push(least)
    assert released(run.lost(2)) == [least]


def test_those_who_are_all_asked_again_are_asked_in_order():
    run = Run(Sync(aggregate=6), 4)
    for worker in (0, 0, 0, 1):
        run.push(worker)
    run.now = 6.0
    run.seen(0)
    run.seen(1)
    assert released(run.expire()) == [0, 1]


def test_one_that_came_back_after_it_gave_is_not_waited_for():
    run = Run(Sync(), 3)
    run.push(1)
    run.join(1)
    run.push(0)
    assert run.quorum.waits_for(0) == Wait("the quorum", 2, 3, (2,))


@pytest.mark.parametrize("max_lead", [0, 2])
def test_a_lead_is_told_from_where_the_slowest_stands(max_lead):
    run = Run(Bounded(max_lead), 2)
    run.push(1)
    for _ in range(max_lead + 2):
        run.push(0)
    assert run.quorum.waits_for(0) == Wait("the slowest worker", max_lead + 1, max_lead, (1,))
