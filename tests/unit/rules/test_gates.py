"""Where workers wait for each other: ends of epochs and barriers, with workers that die, come back and come late."""

from __future__ import annotations

import random

from torchquorum.rules.batch_pool import WorkerLife
from torchquorum.rules.gates import BARRIERS, EPOCHS, Gates, Place
from torchquorum.rules.quorum import Key

A, B, C = WorkerLife(0, 10), WorkerLife(1, 11), WorkerLife(2, 12)


def entered(*lives: WorkerLife) -> Gates:
    gates = Gates()
    for life in lives:
        gates.joined(life)
        gates.enter(life, -1, range(2))
    return gates


def test_nobody_goes_on_before_all_live_workers_have_come() -> None:
    gates = entered(A, B)
    assert gates.come(A, EPOCHS, Place(0, 1))
    assert gates.opened([A, B]) == {} and gates.missing(A, [A, B]) == [1]
    assert gates.come(B, EPOCHS, Place(0, 1))
    assert gates.opened([A, B]) == {A: EPOCHS, B: EPOCHS}
    assert gates.epoch == 0


def test_a_worker_that_was_let_go_on_and_asks_again_does_not_wait_again() -> None:
    gates = entered(A, B)
    gates.come(A, EPOCHS, Place(1))
    gates.come(B, EPOCHS, Place(1))
    gates.opened([A, B])
    assert not gates.come(A, EPOCHS, Place(1)) and gates.epoch == 1


def test_a_worker_that_dies_is_not_waited_for_and_comes_back_in_the_epoch_of_the_run() -> None:
    gates = entered(A, B)
    gates.come(A, EPOCHS, Place(1))
    assert gates.opened([A]) == {A: EPOCHS}
    assert (gates.epoch, gates.members) == (1, (0,))
    again = WorkerLife(1, 99)
    gates.gone(B)
    gates.joined(again)
    assert gates.enter(again, -1, range(2)) == 1
    gates.come(A, EPOCHS, Place(2))
    assert gates.opened([A, again]) == {}
    gates.come(again, EPOCHS, Place(2))
    assert set(gates.opened([A, again])) == {A, again} and gates.members == (0, 1)


def test_one_that_left_its_loop_early_has_come_further_than_one_that_used_its_last_batch() -> None:
    gates = entered(A, B)
    gates.come(B, EPOCHS, Place(1))
    assert gates.opened([A, B]) == {}
    gates.come(A, EPOCHS, Place(0, 1))
    assert gates.opened([A, B]) == {A: EPOCHS}
    gates.come(A, EPOCHS, Place(1))
    assert set(gates.opened([A, B])) == {A, B}


def test_a_new_worker_meets_the_others_at_their_next_barrier() -> None:
    gates = Gates()
    gates.joined(A)
    for number in (1, 2, 3):
        gates.come(A, BARRIERS, Place(number))
        assert gates.opened([A]) == {A: BARRIERS}
    gates.joined(C)
    gates.come(A, BARRIERS, Place(4))
    assert gates.opened([A, C]) == {} and gates.missing(A, [A, C]) == [2]
    gates.come(C, BARRIERS, Place(1))
    assert gates.opened([A, C]) == {A: BARRIERS, C: BARRIERS}


def test_workers_that_wait_for_different_things_are_told() -> None:
    gates = entered(A, B)
    gates.come(A, EPOCHS, Place(1))
    assert not gates.stuck([A, B])
    gates.come(B, BARRIERS, Place(1))
    text = gates.stuck([A, B])
    assert "worker 0 waits at the end of epoch 1" in text and "worker 1 waits at session.barrier() number 1" in text


def test_a_checkpoint_counts_what_is_in_its_variables_and_a_worker_that_comes_back_what_it_gave() -> None:
    gates = entered(A, B)
    first, second, refused = Key(0, 10, 1), Key(0, 10, 2), Key(1, 11, 1)
    gates.decided(first, accepted=True)
    gates.applied([first])
    gates.decided(second, accepted=True)
    gates.decided(refused, accepted=False)
    assert gates.state() == {"epoch": 0, "members": [0, 1], "steps": {"0": 1, "1": 1}}
    assert (gates.steps(0), gates.steps(1)) == (2, 1)
    other = Gates()
    other.restore(gates.state())
    assert (other.steps(0), other.steps(1), other.members) == (1, 1, (0, 1))


def test_what_is_no_state_of_epochs_is_not_restored() -> None:
    gates = Gates()
    for state in ({}, {"epoch": "3"}, {"epoch": -1}, {"epoch": 2, "members": 5}):
        gates.restore(state)
        assert gates.epoch == 0


def test_workers_that_come_and_go_at_random_all_end_in_the_same_epoch() -> None:
    for seed in range(50):
        draw, gates = random.Random(seed), Gates()
        live = [WorkerLife(i, i) for i in range(4)]
        at = dict.fromkeys(live, -1)
        for life in live:
            gates.joined(life)
            at[life] = gates.enter(life, -1, range(4))
        while min(at.values()) < 8:
            life = draw.choice(live)
            if draw.random() < 0.1:
                gates.gone(life)
                again = WorkerLife(life.worker, life.incarnation + 100)
                live[live.index(life)] = again
                del at[life]
                gates.joined(again)
                at[again] = gates.enter(again, -1, range(4))
            elif at[life] == gates.epoch:
                gates.come(life, EPOCHS, Place(at[life] + 1))
                for opened in gates.opened(live):
                    at[opened] += 1
            assert max(at.values()) - min(at.values()) <= 1 and max(at.values()) == gates.epoch


def test_the_pace_of_the_programs_is_the_longest_count_and_is_saved() -> None:
    gates = Gates()
    gates.enter(WorkerLife(0, 1), -1, [0])
    assert "pace" not in gates.state()
    for pace in [(0, 0), (1, 2), (4, 8), (2, 4), (0, 9)]:
        gates.heard(pace)
    assert gates.pace == (4, 8)
    again = Gates()
    again.restore(gates.state())
    assert again.pace == (4, 8)
