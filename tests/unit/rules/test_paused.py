"""Workers that have nothing to compute, and those whose gradient is out of date: what the quorum makes of them."""

from __future__ import annotations

from tests.unit.rules.pushing import Run
from torchquorum.rules import Async, Bounded, Sync
from torchquorum.rules.quorum import Accepted, Applied, Died, Reason, Refused, Released


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
