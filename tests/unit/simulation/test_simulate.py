"""Simulations against what is known in closed form, and `tq.simulate` as users call it."""

import math

import pytest

import torchquorum as tq
from torchquorum.simulation.simulate import simulate


def harmonic(n: int) -> float:
    return math.fsum(1 / i for i in range(1, n + 1))


def test_the_kth_of_n_exponential_times_is_the_difference_of_harmonic_numbers() -> None:
    n, mean = 4, 0.2
    found = simulate("sync", n, f"exponential:{mean}", updates=50_000)  # whose own sampling error is below 0.5 %
    assert len(found.arrivals_s) == n
    for k in range(1, n + 1):
        assert found.arrivals_s[k - 1] == pytest.approx(mean * (harmonic(n) - harmonic(n - k)), rel=0.01), k
    # Sync of all waits for the last of them.
    assert found.updates_per_s == pytest.approx(1 / (mean * harmonic(n)), rel=0.01)


def test_async_makes_as_many_updates_as_gradients_come() -> None:
    found = simulate("async", 20, "exponential:0.5", updates=20_000)
    assert found.updates_per_s == pytest.approx(20 / 0.5, rel=0.01)
    # While a worker computes, each of the 19 others makes one update on average.
    assert found.staleness_mean == pytest.approx(19, rel=0.02)
    assert found.waiting == {} and found.refused == {}


def test_the_best_number_of_backup_workers_is_where_time_times_iterations_is_least() -> None:
    """The method of Chen et al. 2016: the time of the k-th arrival times the iterations needed, which are as 1/k here."""
    n, mean, least = 100, 0.055, 1.0
    arrivals = simulate("sync", n, f"exponential:{mean}:{least}", updates=800).arrivals_s
    by_simulation = min(range(1, n + 1), key=lambda k: arrivals[k - 1] / k)
    by_formula = min(range(1, n + 1), key=lambda k: (least + mean * (harmonic(n) - harmonic(n - k))) / k)
    assert by_formula == 96  # as theirs: of 100 machines, 96 and 4
    assert abs(by_simulation - by_formula) <= 2
    assert arrivals[by_simulation - 1] / by_simulation < 0.98 * arrivals[n - 1] / n


def test_it_is_public() -> None:
    assert tq.simulate(tq.Sync(2), 3, 1.0, updates=5).updates == 5
    assert tq.types.Scenario(rule="sync", workers=2, times=1.0).updates == 1_000
