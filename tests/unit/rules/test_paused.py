"""Workers that have nothing to compute, and those whose gradient is out of date: what the quorum makes of them."""

from __future__ import annotations

import pytest

from tests.unit.rules.pushing import Run
from torchquorum.rules import Async, Bounded, Sync
from torchquorum.rules.quorum import Accepted, Applied, Died, Reason, Refused, Released, Wait


class TestPaused:
    """A worker that has nothing to compute, because others have what is left of the data."""

    def test_nobody_waits_for_it_and_who_gave_is_asked_for_more(self):
        run = Run(Sync(), 2)
        run.push(0)
        assert 0 in run.quorum.held
        actions = run.follow(run.quorum.pause(1, run.lives[1], run.now))
        assert [a.worker for a in actions if isinstance(a, Released)] == [0]
        assert any(isinstance(a, Applied) for a in run.push(0))
        assert run.quorum.live == 1 and run.quorum.alive == [0, 1]

    def test_it_stays_so_through_signs_of_life_until_it_resumes_or_pushes(self):
        run = Run(Sync(), 2)
        run.quorum.pause(1, run.lives[1], run.now)
        run.seen(1)
        assert run.quorum.live == 1
        assert run.quorum.waits_for(1) is not None
        run.quorum.resume(1, run.lives[1], run.now)
        assert run.quorum.live == 2
        run.quorum.pause(1, run.lives[1], run.now)
        run.push(1)
        assert run.quorum.live == 2 and run.quorum.held == {1}

    def test_it_can_die_and_a_bound_on_the_lead_does_not_wait_for_it(self):
        run = Run(Bounded(1), 2)
        run.quorum.pause(1, run.lives[1], run.now)
        for _ in range(5):
            run.push(0)
        assert not run.quorum.held
        run.now += 6.0
        run.seen(0)
        assert [a.worker for a in run.expire() if isinstance(a, Died)] == [1]
        run.seen(1)
        assert run.quorum.live == 2 and run.quorum.workers[1].clock == run.quorum.workers[0].clock

    def test_it_waits_for_a_batch_and_no_worker_is_missing(self):
        run = Run(Sync(), 2)
        run.quorum.pause(1, run.lives[1], run.now)
        assert run.quorum.waits_for(1) == Wait("a batch: others have those that are left", 0, 1, ())

    def test_a_clock_that_resumes_is_level_with_the_slowest(self):
        run = Run(Bounded(1), 2)
        run.quorum.pause(1, run.lives[1], run.now)
        for _ in range(5):
            run.push(0)
        assert run.quorum.resume(1, run.lives[1], run.now) == []
        assert run.quorum.workers[1].clock == run.quorum.workers[0].clock == 5
        run.push(0)
        assert not run.quorum.held

    def test_who_resumes_lets_those_go_who_are_not_too_far_ahead_of_it(self):
        run = Run(Bounded(0), 3)
        run.quorum.pause(2, run.lives[2], run.now)
        run.push(0)
        assert run.quorum.held == {0}
        assert run.follow(run.quorum.resume(2, run.lives[2], run.now)) == [] and run.quorum.held == {0}

    def test_a_clock_that_pushes_out_of_a_pause_counts_from_the_level_of_the_others_and_only_there(self):
        run = Run(Bounded(1), 2)
        run.quorum.pause(1, run.lives[1], run.now)
        for _ in range(5):
            run.push(0)
        run.push(1)
        assert run.quorum.workers[1].clock == 6 and run.quorum.live == 2
        for _ in range(4):
            for worker in (0, 1):
                run.push(worker)
                assert not run.quorum.held

    def test_joining_again_ends_it(self):
        run = Run(Sync(), 2)
        run.quorum.pause(1, run.lives[1], run.now)
        run.quorum.join(1, run.lives[1], run.now)
        assert run.quorum.live == 2 and run.quorum.waits_for(1) is None

    def test_who_has_left_is_not_counted_again_by_a_pause(self):
        run = Run(Sync(), 2)
        run.leave(1)
        assert run.quorum.pause(1, run.lives[1], run.now) == [] and run.quorum.alive == [0] and run.quorum.live == 1

    @pytest.mark.parametrize("sign", ["join", "pause", "resume"])
    def test_whatever_it_says_is_a_sign_of_life(self, sign: str):
        run = Run(Sync(), 2)
        if sign == "resume":
            run.quorum.pause(1, run.lives[1], run.now)
        run.now = 4.0
        run.seen(0)
        getattr(run.quorum, sign)(1, run.lives[1], run.now)
        run.now = 8.0
        assert run.expire() == [] and run.quorum.alive == [0, 1]

    def test_who_waits_for_its_round_is_not_paused(self):
        run = Run(Sync(), 2)
        run.push(0)
        assert run.quorum.pause(0, run.lives[0], run.now) == []
        assert run.quorum.live == 2


def test_a_fenced_worker_is_refused_once_as_expired():
    run = Run(Async(), 1)
    run.quorum.fence(0, run.lives[0])
    assert [a.reason for a in run.push(0) if isinstance(a, Refused)] == [Reason.EXPIRED]
    assert any(isinstance(a, Accepted) for a in run.push(0))


def test_what_is_said_of_another_life_or_of_nobody_changes_nothing():
    run = Run(Async(), 1)
    run.quorum.fence(0, run.lives[0] + 1)
    run.quorum.fence(7, 1)
    assert any(isinstance(a, Accepted) for a in run.push(0))
    assert run.quorum.resume(0, run.lives[0] + 1, run.now) == [] == run.quorum.resume(7, 1, run.now)
