"""Where workers wait for each other: ends of epochs and barriers, with workers that die, come back and come late."""

from __future__ import annotations

import random

from torchquorum.rules.barriers import CALLS, EPOCHS, Barrier, Barriers
from torchquorum.rules.batch_pool import WorkerLife
from torchquorum.rules.quorum import Key

A, B, C = WorkerLife(0, 10), WorkerLife(1, 11), WorkerLife(2, 12)


def entered(*lives: WorkerLife) -> Barriers:
    barriers = Barriers()
    for life in lives:
        barriers.joined(life)
        barriers.enter(life, -1, range(2))
    return barriers


def test_nobody_goes_on_before_all_live_workers_have_come() -> None:
    barriers = entered(A, B)
    assert barriers.come(A, EPOCHS, Barrier(0, 1))
    assert barriers.opened([A, B]) == {} and barriers.missing(A, [A, B]) == [1]
    assert barriers.come(B, EPOCHS, Barrier(0, 1))
    assert barriers.opened([A, B]) == {A: EPOCHS, B: EPOCHS}
    assert barriers.epoch == 0


def test_a_worker_that_was_let_go_on_and_asks_again_does_not_wait_again() -> None:
    barriers = entered(A, B)
    barriers.come(A, EPOCHS, Barrier(1))
    barriers.come(B, EPOCHS, Barrier(1))
    barriers.opened([A, B])
    assert not barriers.come(A, EPOCHS, Barrier(1)) and barriers.epoch == 1


def test_a_worker_that_dies_is_not_waited_for_and_comes_back_in_the_epoch_of_the_run() -> None:
    barriers = entered(A, B)
    barriers.come(A, EPOCHS, Barrier(1))
    assert barriers.opened([A]) == {A: EPOCHS}
    assert (barriers.epoch, barriers.members) == (1, (0,))
    again = WorkerLife(1, 99)
    barriers.gone(B)
    barriers.joined(again)
    assert barriers.enter(again, -1, range(2)) == 1
    barriers.come(A, EPOCHS, Barrier(2))
    assert barriers.opened([A, again]) == {}
    barriers.come(again, EPOCHS, Barrier(2))
    assert set(barriers.opened([A, again])) == {A, again} and barriers.members == (0, 1)


def test_one_that_left_its_loop_early_has_come_further_than_one_that_used_its_last_batch() -> None:
    barriers = entered(A, B)
    barriers.come(B, EPOCHS, Barrier(1))
    assert barriers.opened([A, B]) == {}
    barriers.come(A, EPOCHS, Barrier(0, 1))
    assert barriers.opened([A, B]) == {A: EPOCHS}
    barriers.come(A, EPOCHS, Barrier(1))
    assert set(barriers.opened([A, B])) == {A, B}


def test_a_new_worker_meets_the_others_at_their_next_barrier() -> None:
    barriers = Barriers()
    barriers.joined(A)
    for number in (1, 2, 3):
        barriers.come(A, CALLS, Barrier(number))
        assert barriers.opened([A]) == {A: CALLS}
    barriers.joined(C)
    barriers.come(A, CALLS, Barrier(4))
    assert barriers.opened([A, C]) == {} and barriers.missing(A, [A, C]) == [2]
    barriers.come(C, CALLS, Barrier(1))
    assert barriers.opened([A, C]) == {A: CALLS, C: CALLS}


def test_workers_that_wait_for_different_things_are_told() -> None:
    barriers = entered(A, B)
    barriers.come(A, EPOCHS, Barrier(1))
    assert not barriers.stuck([A, B])
    barriers.come(B, CALLS, Barrier(1))
    text = barriers.stuck([A, B])
    assert "worker 0 waits at the end of epoch 1" in text and "worker 1 waits at session.barrier() number 1" in text


def test_a_checkpoint_counts_what_is_in_its_variables_and_a_worker_that_comes_back_what_it_gave() -> None:
    barriers = entered(A, B)
    first, second, refused = Key(0, 10, 1), Key(0, 10, 2), Key(1, 11, 1)
    barriers.decided(first, accepted=True)
    barriers.applied([first])
    barriers.decided(second, accepted=True)
    barriers.decided(refused, accepted=False)
    assert barriers.state() == {"epoch": 0, "members": [0, 1], "steps": {"0": 1, "1": 1}}
    assert (barriers.steps(0), barriers.steps(1)) == (2, 1)
    other = Barriers()
    other.restore(barriers.state())
    assert (other.steps(0), other.steps(1), other.members) == (1, 1, (0, 1))


def test_what_is_no_state_of_epochs_is_not_restored() -> None:
    barriers = Barriers()
    for state in ({}, {"epoch": "3"}, {"epoch": -1}, {"epoch": 2, "members": 5}):
        barriers.restore(state)
        assert barriers.epoch == 0


def test_workers_that_come_and_go_at_random_all_end_in_the_same_epoch() -> None:
    for seed in range(50):
        draw, barriers = random.Random(seed), Barriers()
        live = [WorkerLife(i, i) for i in range(4)]
        at = dict.fromkeys(live, -1)
        for life in live:
            barriers.joined(life)
            at[life] = barriers.enter(life, -1, range(4))
        while min(at.values()) < 8:
            life = draw.choice(live)
            if draw.random() < 0.1:
                barriers.gone(life)
                again = WorkerLife(life.worker, life.incarnation + 100)
                live[live.index(life)] = again
                del at[life]
                barriers.joined(again)
                at[again] = barriers.enter(again, -1, range(4))
            elif at[life] == barriers.epoch:
                barriers.come(life, EPOCHS, Barrier(at[life] + 1))
                for opened in barriers.opened(live):
                    at[opened] += 1
            assert max(at.values()) - min(at.values()) <= 1 and max(at.values()) == barriers.epoch


def test_the_pace_of_the_programs_is_the_longest_count_and_is_saved() -> None:
    barriers = Barriers()
    barriers.enter(WorkerLife(0, 1), -1, [0])
    assert "pace" not in barriers.state()
    for pace in [(0, 0), (1, 2), (4, 8), (2, 4), (0, 9)]:
        barriers.heard(pace)
    assert barriers.pace == (4, 8)
    again = Barriers()
    again.restore(barriers.state())
    assert again.pace == (4, 8)


def test_who_begins_in_an_epoch_does_not_wait_for_its_beginning() -> None:
    barriers = entered(A, B)
    assert barriers.come(A, EPOCHS, Barrier(0)) is False
    assert barriers.missing(A, [A, B]) == []


def test_who_has_said_nothing_yet_is_waited_for() -> None:
    barriers = Barriers()
    barriers.joined(A)
    barriers.joined(B)
    assert barriers.come(A, EPOCHS, Barrier(0)) and barriers.missing(A, [A, B]) == [1]


def test_a_program_that_only_calls_barriers_has_no_epochs() -> None:
    barriers = Barriers()
    barriers.joined(A)
    barriers.come(A, CALLS, Barrier(1))
    assert not barriers.used and barriers.state() == {}
    barriers.come(A, EPOCHS, Barrier(0, 1))
    assert barriers.used and barriers.state() == {"epoch": 0, "members": [], "steps": {}}


def test_live_workers_may_be_given_in_any_order_and_once() -> None:
    barriers = entered(A, B)
    barriers.come(A, CALLS, Barrier(1))
    barriers.come(B, EPOCHS, Barrier(1))
    text = "worker 0 waits at session.barrier() number 1; worker 1 waits at the end of epoch 1"
    assert barriers.stuck(iter([B, A])) == text and barriers.opened(iter([B, A])) == {}
    barriers.come(B, CALLS, Barrier(1))
    assert barriers.opened(iter([B, A])) == {A: CALLS, B: CALLS}


def test_nobody_is_stuck_who_computes_or_whose_wait_is_over() -> None:
    barriers = entered(A, B)
    assert barriers.stuck([A, B]) == "" and barriers.stuck([]) == ""
    barriers.come(A, EPOCHS, Barrier(1))
    barriers.come(B, EPOCHS, Barrier(1))
    assert barriers.stuck([A, B]) == ""


def test_a_new_epoch_counts_from_zero_and_another_loop_of_the_same_one_goes_on() -> None:
    barriers = entered(A, B)
    first, second = Key(0, 10, 1), Key(0, 10, 2)
    for key in (first, second):
        barriers.decided(key, accepted=True)
    barriers.applied([first])
    for life in (A, B):
        barriers.come(life, EPOCHS, Barrier(0, 1))
    barriers.opened([A, B])
    assert barriers.enter(A, 0, []) == 0 and barriers.steps(0) == 2
    for life in (A, B):
        barriers.come(life, EPOCHS, Barrier(1))
    barriers.opened([A, B])
    assert barriers.steps(0) == 0
    barriers.decided(Key(0, 10, 3), accepted=False)
    assert barriers.state()["steps"] == {"0": 1}  # what the epoch before had open is none of this one's


def test_who_knows_a_later_epoch_brings_the_run_there() -> None:
    barriers = Barriers()
    barriers.joined(A)
    assert barriers.enter(A, 3, [0, 1]) == 3 == barriers.epoch and barriers.members == (0, 1)


def test_one_that_was_not_seen_to_join_counts_its_calls_from_the_first() -> None:
    barriers = Barriers()
    barriers.joined(B)
    barriers.come(A, CALLS, Barrier(1))
    barriers.come(B, CALLS, Barrier(1))
    assert set(barriers.opened([A, B])) == {A, B}
    barriers = Barriers()
    barriers.joined(B)
    barriers.come(A, CALLS, Barrier(1))
    barriers.come(B, CALLS, Barrier(2))
    assert set(barriers.opened([A, B])) == {A}


def test_a_pace_is_taken_from_the_one_that_has_counted_for_longest() -> None:
    barriers = Barriers()
    for pace, known in [((1, 2), (1, 2)), ((2, 3), (2, 3)), ((3, 3), (2, 3)), ((4, 8), (4, 8)), ((5, 6), (4, 8))]:
        barriers.heard(pace)
        assert barriers.pace == known
    barriers = Barriers()
    barriers.heard((2, 1))
    barriers.heard((1, 2))
    assert barriers.pace == (1, 2)
