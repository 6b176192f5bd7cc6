"""Rules side by side, and the number of backup workers."""

import pytest

from torchquorum.errors import ConfigError
from torchquorum.simulation.scenario import Scenario
from torchquorum.simulation.sweep import best_of, estimate_by_arrivals, read_sweep, sweep


def test_a_sweep_is_a_list_of_rules_each_once() -> None:
    assert read_sweep("sync, ASYNC,,sync,bounded:3", 4) == ["sync", "async", "bounded:3"]
    assert read_sweep("backup,async", 4) == ["sync:2", "sync:3", "sync", "async"]
    for wrong, message in (
        (" , ", "at least one rule"),
        ("sync,fast", "allowed are"),
        ("sync:2of3", "is for 3 workers"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_sweep(wrong, 4)


@pytest.mark.parametrize("workers", [1, 2, 47, 100, 1000, 10_000])
def test_backup_tries_few_backup_workers_one_by_one_and_many_in_larger_steps(workers: int) -> None:
    numbers = [int(rule.partition(":")[2] or workers) for rule in read_sweep("backup", workers)]
    assert numbers == sorted(numbers) and numbers[-1] == workers and len(numbers) <= 60
    few = range(max(workers - 6, (workers + 1) // 2), workers + 1)
    assert set(few) <= set(numbers) and min(numbers) >= workers // 2


def test_the_best_is_the_one_with_the_most_progress() -> None:
    slow = {3: 9.0}
    found = sweep(Scenario(rule="sync", workers=4, times=1.0, slow=slow, updates=50), ["sync", "sync:3", "sync:2"])
    assert [r.aggregate for r in found] == [4, 3, 2]
    assert best_of(found).name == "sync:3"
    # Where one gradient is as good as three, the rule that takes the more of them in the same time is still the better.
    same = sweep(Scenario(rule="sync", workers=4, times=1.0, slow=slow, updates=50, noise=0.0), ["sync:2", "sync:3"])
    assert best_of(same).name == "sync:3"
    assert sweep(Scenario(rule="sync", workers=2, times=1.0, updates=5), ["async", "sync:auto"])[0].aggregate is None


def test_the_estimate_by_arrivals_is_time_over_worth() -> None:
    slow = {0: 1.0, 1: 2.0, 2: 6.0}
    plain = sweep(Scenario(rule="sync", workers=3, times=1.0, slow=slow, updates=9), ["sync"])[0]
    assert estimate_by_arrivals(plain) == pytest.approx([1.0, 1.0, 2.0])
    noisy = sweep(Scenario(rule="sync", workers=3, times=1.0, slow=slow, updates=9, noise=1.0), ["sync"])[0]
    assert estimate_by_arrivals(noisy) == pytest.approx([2.0, 3.0, 8.0])
