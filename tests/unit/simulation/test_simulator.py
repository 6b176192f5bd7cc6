"""The quorum in virtual time against small cases worked out by hand."""

import pytest

from torchquorum.rules.quorum import QUORUM, SLOWEST
from torchquorum.simulation.network import Network
from torchquorum.simulation.scenario import Scenario, SlowDown
from torchquorum.simulation.simulate import run_scenario, simulate
from torchquorum.simulation.step_times import Recorded


def test_bounded_as_worked_out_by_hand() -> None:
    """Bounded(1), steps of 1 and 3 s. Worker 0 pushes at 1 and 2 (lead 2: waits), worker 1 at 3 (both go on).

    Then worker 0 pushes at 4 (lead 2: waits), worker 1 at 6; and so on: every 3 s two updates.
    """
    counts = run_scenario(Scenario(rule="bounded:1", workers=2, times=1.0, slow={1: 3.0}, updates=7))
    assert list(counts.update_times) == [1, 2, 3, 4, 6, 7, 9]
    assert counts.waited == {SLOWEST: (3 - 2) + (6 - 4) + (9 - 7)}
    # w0#1 v0 met 0; w0#2 v1 met 1; w1#1 v0 met 2; w0#3 v3 met 3; w1#2 v3 met 4; w0#4 v5 met 5; w1#3 v5 met 6
    assert counts.staleness == {0: 4, 1: 2, 2: 1}


def test_buffered_rounds_as_worked_out_by_hand() -> None:
    """Buffered(3), steps of 1 and 2 s: gradients at 1, 2, 2, 3, 4, 4: the third is an update, and the sixth."""
    counts = run_scenario(Scenario(rule="buffered:3", workers=2, times=1.0, slow={1: 2.0}, updates=2))
    assert list(counts.update_times) == [2, 4]
    assert list(counts.sizes) == [3, 3]
    assert counts.waited == {}


def test_backup_workers_as_worked_out_by_hand() -> None:
    """Sync(2) of steps 1, 1 and 3 s: an update each second; the third worker's gradient is stale at 3, 6 and 9."""
    counts = run_scenario(Scenario(rule="sync:2of3", workers=3, times=1.0, slow={2: 3.0}, updates=9))
    assert list(counts.update_times) == list(range(1, 10))
    assert counts.refused == {"stale": 3}
    assert counts.waited == {QUORUM: 0.0}


def test_sync_waits_for_the_slow_one_and_says_so() -> None:
    found = simulate("sync", 3, 1.0, slow={1: 3.0}, updates=10, batch_size=32)
    assert found.seconds == 30 and found.updates_per_s == pytest.approx(1 / 3)
    assert found.examples_per_s == pytest.approx(32.0)
    assert found.waiting == {QUORUM: pytest.approx(4 / 9)}
    assert found.computing == pytest.approx(5 / 9)


def test_pipelined_a_worker_computes_while_its_gradient_travels() -> None:
    net = Network(size_bytes=1.0, bandwidth=1.0)  # one second each way
    plain = run_scenario(Scenario(rule="async", workers=1, times=3.0, network=net, updates=3))
    assert list(plain.update_times) == [5, 10, 15]  # 1 down, 3 computing, 1 up
    piped = run_scenario(Scenario(rule="async:pipeline", workers=1, times=3.0, network=net, updates=3))
    assert list(piped.update_times) == [5, 8, 11]
    assert plain.staleness == {0: 3} and piped.staleness == {0: 1, 1: 2}


def test_pipelined_it_waits_for_the_answer_before_its_next_push() -> None:
    net = Network(size_bytes=1.0, bandwidth=1.0)
    piped = run_scenario(Scenario(rule="async:pipeline", workers=1, times=0.5, network=net, updates=3))
    assert list(piped.update_times) == [2.5, 4.5, 6.5]
    assert piped.waited == {"the answer to the push before": 1.5 + 1.5 + 0.5}


def test_the_links_of_the_ps_are_shared() -> None:
    """Two workers send at once: one arrives a second after the other, and both get the variables one after the other."""
    net = Network(size_bytes=10.0, bandwidth=10.0)
    counts = run_scenario(Scenario(rule="sync", workers=2, times=1.0, network=net, updates=2))
    # Down at 1 and 2, computed at 2 and 3, up at 3 and 4: update. Down at 5 and 6, and so on.
    assert list(counts.update_times) == [4, 8]
    half = Network(size_bytes=10.0, bandwidth=10.0, ps=2, worker_bandwidth=10.0)
    both = run_scenario(Scenario(rule="sync", workers=2, times=1.0, network=half, updates=1))
    assert list(both.update_times) == [3]  # two ps tasks take both at once; a worker's own link takes a second each way


def test_a_failed_worker_is_missed_until_it_is_noticed_and_counts_again_when_it_is_back() -> None:
    # Only one of two workers can fail at the same moment, so a seed is enough to see a failure early.
    alone = simulate("sync", 2, 1.0, fail_s=50.0, restart_s=20.0, notice_s=5.0, seconds=2_000.0, seed=1)
    well = simulate("sync", 2, 1.0, seconds=2_000.0)
    assert alone.failures > 20
    assert 0.5 * well.updates < alone.updates < well.updates
    never = simulate("sync", 2, 1.0, fail_s=50.0, seconds=2_000.0, seed=1)
    assert never.failures == 2 and never.seconds < 2_000.0  # nothing can happen any more


def test_workers_arrive_while_places_are_free() -> None:
    found = simulate("async", 10, 1.0, start=2, arrive_s=5.0, seconds=1_000.0, seed=2)
    all_there = simulate("async", 10, 1.0, seconds=1_000.0).updates
    assert 0.9 * all_there < found.updates < all_there
    back = simulate("async", 10, 1.0, start=2, arrive_s=5.0, fail_s=100.0, seconds=1_000.0, seed=2)
    assert back.failures > 30 and back.updates < found.updates


def test_speeds_change_when_the_scenario_says() -> None:
    slow = [SlowDown(10.0, {0: 2.0}), SlowDown(30.0, {0: 1.0})]
    counts = run_scenario(Scenario(rule="sync", workers=1, times=1.0, slow=slow, seconds=40.5))
    assert list(counts.update_times) == [*range(1, 11), *range(12, 31, 2), *range(31, 41)]


@pytest.mark.parametrize("rule", ["sync:3", "bounded:2"])
def test_the_same_scenario_gives_the_same_figures(rule: str) -> None:
    one, two, other = (simulate(rule, 5, "lognormal:0.1:0.5", fail_s=5.0, restart_s=1.0, seed=s) for s in (1, 1, 2))
    assert one == two != other


def test_every_rule_meets_the_same_workers() -> None:
    recorded = Recorded({0: [1.0, 2.0], 1: [3.0]})
    counts = run_scenario(Scenario(rule="async", workers=2, times=recorded, updates=6))
    assert list(counts.update_times) == [1, 3, 3, 4, 6, 6]
    more = simulate("async", 3, recorded, updates=100)
    assert more.updates_per_s > simulate("async", 2, recorded, updates=100).updates_per_s
