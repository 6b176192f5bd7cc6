"""What the quorum decides, one behaviour a test. Workers push by hand here; the property tests let them loose."""

from __future__ import annotations

from itertools import product

import pytest

from torchquorum.rules import Async, Bounded, Buffered, Quorum, Rule, Sync
from torchquorum.rules.quorum import (
    Accepted,
    Action,
    Applied,
    Died,
    Discarded,
    Key,
    Reason,
    Refused,
    Released,
    Repeated,
    Wait,
)

PRESETS = [Async(), Sync(), Sync(aggregate=2), Bounded(0), Bounded(2), Buffered(2), Buffered(3)]


class Run:
    """A quorum with workers 0..n-1 that have joined; each pushes its next gradient at the version it was released at."""

    def __init__(self, rule: Rule, num_workers: int, *, joined: int | None = None, version=0, last_step=None):
        self.quorum = Quorum(rule, num_workers, version=version, last_step=last_step)
        self.now = 0.0
        self.at: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.lives: dict[int, int] = {}
        for worker in range(num_workers if joined is None else joined):
            self.join(worker)

    def follow(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Released):
                self.at[action.worker] = action.version
        return actions

    def join(self, worker: int) -> list[Action]:
        self.lives[worker] = self.lives.get(worker, 100 * worker) + 1
        self.steps[worker] = 0
        return self.follow(self.quorum.join(worker, self.lives[worker], self.now))

    def key(self, worker: int) -> Key:
        return Key(worker, self.lives[worker], self.steps[worker])

    def push(self, worker: int, *, finite: bool = True) -> list[Action]:
        self.steps[worker] += 1
        return self.follow(self.quorum.push(self.key(worker), self.at[worker], self.now, finite=finite))

    def seen(self, worker: int) -> None:
        self.quorum.seen(worker, self.lives[worker], self.now)

    def lost(self, worker: int) -> list[Action]:
        return self.follow(self.quorum.lost(worker, self.lives[worker], "its process ended"))

    def leave(self, worker: int) -> list[Action]:
        return self.follow(self.quorum.leave(worker, self.lives[worker]))

    def expire(self) -> list[Action]:
        return self.follow(self.quorum.expire(self.now))

    def computing(self) -> list[int]:
        return [i for i in self.quorum.alive if i not in self.quorum.held]


def verdict(actions: list[Action]) -> Reason | None:
    return next((a.reason for a in actions if isinstance(a, Accepted | Refused)), None)


def applied(actions: list[Action]) -> list[Applied]:
    return [a for a in actions if isinstance(a, Applied)]


def released(actions: list[Action]) -> list[int]:
    return [a.worker for a in actions if isinstance(a, Released)]


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


# -- the end ----------------------------------------------------------------------------------------------------------


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
