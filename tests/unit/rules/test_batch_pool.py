"""The batches of the epochs: none is lost and none counts twice, whoever takes, dies, freezes, comes back or is restored."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchquorum.rules.batch_pool import Grant, Pool, WorkerLife
from torchquorum.rules.quorum import Key

A, B = WorkerLife(0, 1), WorkerLife(1, 1)


def test_batches_are_given_in_order_and_the_same_request_has_the_same_answer() -> None:
    pool = Pool(10, 2)
    assert pool.take(A, 1, [1, 2]) == Grant((0, 1))
    assert pool.take(A, 1, [1, 2]) == Grant((0, 1))
    assert pool.take(B, 1, [1]) == Grant((2,))
    assert pool.leased == 3


def test_near_the_end_nobody_is_given_many() -> None:
    pool = Pool(8, 1)
    assert pool.take(A, 1, range(1, 9), live=2).numbers == (0, 1)
    assert pool.take(B, 1, range(1, 9), live=2).numbers == (2,)


def test_a_batch_is_done_when_its_gradient_is_in_the_variables() -> None:
    pool = Pool(2, 1)
    pool.take(A, 1, [1])
    key = Key(*A, 1)
    assert pool.counts(key) and pool.decided(key, accepted=True) == (0,)
    assert pool.done == (0, [])  # its round is open: a checkpoint made now does not have it
    assert pool.applied([key]) == [0]
    assert pool.done == (1, [])


def test_what_was_refused_is_next_but_what_is_not_finite_is_given_up() -> None:
    pool = Pool(4, 1)
    pool.take(A, 1, [1], live=1)
    pool.decided(Key(*A, 1), accepted=False)
    assert pool.take(B, 1, [1]).numbers == (0,)
    pool.decided(Key(*B, 1), accepted=False, spent=True)
    assert pool.done == (1, [])
    assert pool.take(B, 2, [2]).numbers == (1,)
    assert (pool.again, pool.unusable) == (1, 1)


def test_what_a_dead_worker_had_is_anothers_and_what_it_computed_does_not_count() -> None:
    pool = Pool(8, 1)
    pool.take(A, 1, [1, 2], live=1)
    pool.gone(A, for_good=False)
    assert pool.take(B, 1, [1, 2], live=1).numbers == (0, 1)
    assert not pool.counts(Key(*A, 1)) and not pool.counts(Key(*A, 2))
    assert pool.decided(Key(*A, 1), accepted=False) == ()
    assert pool.take(A, 2, [2]) == Grant(void=True)  # it has to say that it has dropped what it had
    assert pool.take(A, 3, [3], void=2).numbers == (2,)
    assert pool.counts(Key(*A, 3)) and not pool.counts(Key(*A, 2))


def test_several_batches_may_be_for_one_step() -> None:
    pool = Pool(20, 1)
    pool.take(A, 1, [1, 2, 3, 4])
    assert pool.assign(A, {0: 1, 1: 1, 2: 2, 3: 2})
    assert pool.decided(Key(*A, 1), accepted=True) == (0, 1)
    assert pool.assign(A, {0: 3}) is False and pool.assign(B, {2: 1}) is False
    assert pool.decided(Key(*A, 2), accepted=True) == (2, 3)


def test_of_an_earlier_step_nothing_can_come_any_more() -> None:
    pool = Pool(20, 1)
    pool.take(A, 1, [1, 2])
    assert pool.decided(Key(*A, 2), accepted=True) == (1,)
    assert pool.leased == 0
    assert pool.take(B, 1, [1]).numbers == (0,)


def test_it_is_over_when_all_are_given_or_nobody_computes() -> None:
    pool = Pool(2, 1)
    pool.take(A, 1, [1], live=1)
    pool.take(B, 1, [1], live=1)
    assert pool.take(B, 2, [2], idle=True) == Grant()  # A has one that may come back
    pool.decided(Key(*A, 1), accepted=True)
    assert pool.take(A, 2, [2], idle=True) == Grant(over=True)  # B has one, and waits for more to make a step of
    assert not pool.over
    pool.decided(Key(*B, 1), accepted=True)
    assert pool.over


def test_a_pool_goes_on_from_what_is_done_also_for_more_epochs() -> None:
    pool = Pool(4, 2, low=1, done=[3, 5])
    assert [pool.take(A, i, [i], live=1).numbers[0] for i in range(1, 6)] == [1, 2, 4, 6, 7]
    assert pool.take(A, 6, [6]).numbers == ()
    assert Pool(4, 1, low=1, done=[3, 5]).take(A, 1, range(9), live=0).numbers == (1,)
    assert Pool(4, None, low=7).take(A, 1, [1]).numbers == (7,)


def test_what_is_granted_says_nothing_that_was_not_said() -> None:
    grant = Pool(10, 1).take(A, 1, [1])
    assert (grant.numbers, grant.over, grant.void) == ((0,), False, False)
    assert (Grant().over, Grant().void) == (False, False)


def test_an_older_request_is_void_and_a_gradient_of_nobody_is_of_no_batch() -> None:
    pool = Pool(10, 1)
    pool.take(A, 5, [1])
    assert pool.counts(Key(*A, 0))  # of a step that has no batches
    assert pool.take(A, 4, [2]) == Grant(void=True)
    assert pool.counts(Key(*B, 1)) and pool.decided(Key(*B, 1), accepted=True) == ()
    assert pool.leased == 1


def test_a_life_that_is_void_is_so_until_it_says_that_it_holds_nothing() -> None:
    pool = Pool(10, 1)
    assert not pool.is_void(A, 0)
    pool.take(A, 1, [1])
    assert not pool.is_void(A, 0)
    pool.gone(B, for_good=True)
    pool.gone(A, for_good=False)
    assert pool.is_void(A, 10**9) and not pool.assign(A, {})
    assert pool.take(A, 2, [5], void=4).numbers == (0,)
    assert pool.is_void(A, 3) and not pool.is_void(A, 4)
    assert pool.counts(Key(*A, 5)) and not pool.counts(Key(*A, 4))
    assert pool.assign(A, {0: 4}) and pool.counts(Key(*A, 4))  # it has a lease now


def test_who_waited_and_has_pushed_since_computes_again() -> None:
    pool = Pool(3, 1)
    assert [pool.take(A, i, [i]).numbers for i in (1, 2)] == [(0,), (1,)]
    assert pool.take(B, 1, [1]).numbers == (2,)
    assert pool.take(A, 3, [3], idle=True) == Grant()
    pool.decided(Key(*A, 1), accepted=True)
    pool.decided(Key(*B, 1), accepted=True)
    assert pool.take(B, 2, [2], idle=True) == Grant()  # the batch of A's second step may come back
    assert pool.take(A, 4, [3], idle=True) == Grant(over=True)  # now it waits, too


def test_requests_may_begin_at_0_and_one_worker_alone_takes_half_of_what_is_left() -> None:
    assert Pool(8, 1).take(A, 0, range(1, 9)).numbers == (0, 1, 2, 3)


def test_who_says_that_it_holds_nothing_has_given_back_what_it_had() -> None:
    pool = Pool(20, 1)
    pool.take(A, 1, [1, 2])
    assert pool.take(A, 2, [3, 4, 5], void=2).numbers == (0, 1, 2)
    assert (pool.leased, pool.again) == (3, 2)


def test_a_restored_pool_holds_no_more_than_it_must() -> None:
    pool = Pool(4, 2, low=1, done=[1, 2, 5, 0])
    assert pool.done == (3, [5]) and pool.used == 4


def test_a_restored_pool_gives_all_that_is_not_done_and_nothing_beyond_its_end() -> None:
    last = Pool(4, 2, done=[7])
    assert [last.take(A, i, [i]).numbers for i in range(1, 9)] == [*((n,) for n in range(7)), ()]
    shorter = Pool(4, 1, low=1, done=[3, 5])
    assert [shorter.take(A, i, [i]).numbers for i in range(1, 4)] == [(1,), (2,), ()]


def test_a_life_that_is_over_for_good_is_forgotten() -> None:
    pool = Pool(4, 1)
    pool.take(A, 1, [1])
    pool.gone(A, for_good=True)
    assert not pool.is_void(A, 0) and pool.leased == 0


def test_without_an_end_there_is_always_more() -> None:
    pool = Pool(2)
    assert pool.take(A, 1, range(1, 8), live=3).numbers == tuple(range(7))
    assert not pool.over and pool.used == 0


class Computing:
    """A worker of the machine below: its life, what it believes to hold, and the gradients on their way."""

    def __init__(self, life: WorkerLife) -> None:
        self.life, self.step, self.request = life, 0, 0
        self.held: list[tuple[int, int]] = []  # batch, step
        self.void = self.dead = False
        self.sent: list[tuple[int, int]] = []


class Sharing(RuleBasedStateMachine):
    """Workers that take, push, die, freeze, return and leave in any order; a ps that is restored from checkpoints.

    `variables` are the batches in the variables, as the gradients that were applied brought them.
    """

    @initialize(size=st.integers(1, 7), epochs=st.integers(1, 3), per_step=st.integers(1, 3), seed=st.integers(0, 99))
    def begin(self, size: int, epochs: int, per_step: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.total, self.per_step, self.epochs, self.size = size * epochs, per_step, epochs, size
        self.pool = Pool(size, epochs)
        self.workers = {i: Computing(WorkerLife(i, 1)) for i in range(3)}
        self.round: list[Key] = []
        self.of: dict[Key, tuple[int, ...]] = {}
        self.variables: list[int] = []
        self.saved: tuple[tuple[int, list[int]], list[int]] = ((0, []), [])

    @rule(index=st.integers(0, 2), count=st.integers(1, 6), lost=st.booleans())
    def take(self, index: int, count: int, lost: bool) -> None:
        worker = self.workers[index]
        first = max([s for _, s in worker.held] or [worker.step]) + 1
        steps = [first + i // self.per_step for i in range(count)]
        worker.request += 1
        void = worker.step if worker.void else None
        grant = self.pool.take(worker.life, worker.request, steps, live=3, void=void)
        if lost:  # the answer does not arrive, and the worker asks again
            assert self.pool.take(worker.life, worker.request, steps, live=3, void=void) == grant or grant.void
        if grant.void:
            worker.held, worker.void = [], True
        else:
            worker.void = False
            worker.held += zip(grant.numbers, steps, strict=False)
        if grant.over:
            # Given, in an open round or in the variables: nothing is left but what is on its way from nobody.
            assert not any(w.held for w in self.workers.values() if not w.dead and not w.void)

    @rule(index=st.integers(0, 2))
    def compute(self, index: int) -> None:
        """The gradient of the next step is on its way; it may arrive much later, or never."""
        worker = self.workers[index]
        if worker.held and not worker.sent:
            worker.step = worker.held[0][1]
            worker.sent = [pair for pair in worker.held if pair[1] == worker.step]
            worker.held = worker.held[len(worker.sent) :]

    @rule(index=st.integers(0, 2), refuse=st.sampled_from(["", "", "", "stale"]))
    def arrive(self, index: int, refuse: str) -> None:
        worker = self.workers[index]
        if not worker.sent:
            return
        numbers, worker.sent = tuple(n for n, _ in worker.sent), []
        key = Key(*worker.life, worker.step)
        counts = self.pool.counts(key)
        accepted = counts and not refuse
        of = self.pool.decided(key, accepted=accepted)
        assert of == numbers if counts else not of
        if accepted:
            self.round.append(key)
            self.of[key] = numbers
        elif not counts:  # "expired": the worker hears of it
            worker.held, worker.void = [], True

    @precondition(lambda self: self.round)
    @rule(count=st.integers(1, 3))
    def close_round(self, count: int) -> None:
        keys, self.round = self.round[:count], self.round[count:]
        applied = self.pool.applied(keys)
        assert applied == [n for key in keys for n in self.of[key]]
        self.variables += applied

    @rule(index=st.integers(0, 2))
    def taken_for_dead(self, index: int) -> None:
        self.pool.gone(self.workers[index].life, for_good=False)

    @rule(index=st.integers(0, 2), others=st.booleans())
    def frozen_while_computing(self, index: int, others: bool) -> None:
        """Taken for dead in the middle of a batch, which another may have by the time its gradient arrives."""
        self.take(index, 2, False)
        self.compute(index)
        self.taken_for_dead(index)
        if others:
            self.take((index + 1) % 3, 2, False)
        self.arrive(index, "")

    @rule(index=st.integers(0, 2), says_so=st.booleans())
    def killed_and_replaced(self, index: int, says_so: bool) -> None:
        before = self.workers[index].life
        if says_so:
            self.pool.gone(before, for_good=False)
        self.pool.gone(before, for_good=True)
        self.workers[index] = Computing(WorkerLife(index, before.incarnation + 1))

    @rule(index=st.integers(0, 2))
    def recovered(self, index: int) -> None:
        """A connection was lost: the worker gives up what it holds, and what is still on its way."""
        worker = self.workers[index]
        worker.held, worker.void = [], True

    @rule()
    def save(self) -> None:
        self.saved = self.pool.done, list(self.variables)

    @rule()
    def restore(self) -> None:
        (low, done), self.variables = self.saved[0], list(self.saved[1])
        self.pool = Pool(self.size, self.epochs, low, done)
        self.round.clear()
        for index, worker in self.workers.items():
            # Every worker joins again and asks anew; what was on its way is known to nobody, and given up.
            self.workers[index] = again = Computing(WorkerLife(index, worker.life.incarnation + 1))
            again.void = True

    @invariant()
    def none_is_in_the_variables_twice(self) -> None:
        if hasattr(self, "pool"):
            assert len(self.variables) == len(set(self.variables))
            low, done = self.pool.done
            assert sorted(self.variables) == [*range(low), *done]

    def teardown(self) -> None:
        """Whatever happened, workers that come now bring the epochs to their end with every batch exactly once."""
        if not hasattr(self, "pool"):
            return
        for worker in self.workers.values():
            self.pool.gone(worker.life, for_good=True)
        self.close_round(len(self.round)) if self.round else None
        life, step = WorkerLife(9, 1), 0
        while (grant := self.pool.take(life, step + 1, [step + 1], idle=True)).numbers:
            step += 1
            key = Key(*life, step)
            self.pool.decided(key, accepted=True)
            self.variables += self.pool.applied([key])
        assert grant.over and self.pool.over
        assert sorted(self.variables) == list(range(self.total))


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
