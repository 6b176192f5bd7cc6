"""The estimator of step times: what counts, for how long, and when a speed is new."""

from __future__ import annotations

import pytest

from torchquorum.rules.times import CLEAR, WINDOW, StepTimes, quantile


def told(*seconds: float, worker: int = 0) -> StepTimes:
    """Times of a worker whose first step took 100 s."""
    times, now = StepTimes(), 0.0
    times.joins(worker)
    for step in (100.0, *seconds):
        times.begins(worker, now)
        now += step
        times.ends(worker, now)
    return times


def test_the_first_step_has_the_start_up_in_it_and_does_not_count() -> None:
    assert told().known(0) == 0 and told().expected(0, 0.0) == []
    assert told(1.0, 2.0).expected(0, 0.0) == [1.0, 2.0]


def test_only_the_last_steps_count() -> None:
    steps = [1.0 + 0.01 * (i % 5) for i in range(WINDOW + 7)]
    assert told(*steps).expected(0, 0.0) == pytest.approx(steps[-WINDOW:])
    assert told(*steps).known(0) == WINDOW


@pytest.mark.parametrize(("factor", "new"), [(3.0, True), (0.3, True), (1.1, False), (0.95, False)])
def test_a_new_speed_makes_what_was_before_forgotten(factor: float, new: bool) -> None:
    before, after = [1.0, 1.1, 0.9, 1.0], [factor, 1.05 * factor, 0.98 * factor]
    times = told(*before, *after[: CLEAR - 1])
    assert times.known(0) == len(before) + CLEAR - 1
    times = told(*before, *after)
    assert times.expected(0, 0.0) == pytest.approx(after if new else before + after)


def test_one_slow_step_is_no_new_speed() -> None:
    assert told(1.0, 1.0, 1.0, 9.0, 1.0, 9.0, 9.0).known(0) == 7


def test_too_few_steps_before_are_no_old_speed() -> None:
    assert told(1.0, 1.0, 9.0, 9.0, 9.0).known(0) == 5
    assert told(1.0, 1.0, 1.0, 9.0, 9.0, 9.0).known(0) == 3


def test_changes_are_counted_when_a_worker_begins_when_it_is_known_and_when_its_speed_is_new() -> None:
    assert told().changes == 1
    assert told(1.0, 1.0).changes == 1
    assert told(1.0, 1.0, 1.0).changes == 2 == told(1.0, 1.0, 1.0, 1.0, 2.0, 2.0).changes
    assert told(1.0, 1.0, 1.0, 2.0, 2.0, 2.0).changes == 3


def test_a_step_that_has_taken_very_long_is_expected_to_take_as_long_again() -> None:
    times = told(1.0, 2.0)
    times.begins(0, 200.0)
    assert times.expected(0, 203.9) == [1.0, 2.0]
    assert times.expected(0, 206.0) == [12.0]
    times.ends(0, 206.0)
    assert times.expected(0, 300.0) == [1.0, 2.0, 6.0]


def test_a_pause_is_no_step() -> None:
    times = told(1.0, 2.0)
    times.begins(0, 200.0)
    times.pauses(0)
    assert times.expected(0, 900.0) == [1.0, 2.0]
    times.ends(0, 900.0)
    assert times.known(0) == 2


def test_a_new_process_is_unknown_again() -> None:
    times = told(1.0, 2.0)
    times.joins(0)
    assert times.known(0) == 0 and times.quantile(0, 0.5) is None and times.known(7) == 0
    assert times.quantile(7, 0.5) is None and times.expected(7, 0.0) == []


def test_quantiles() -> None:
    times = told(3.0, 1.0, 2.0, 4.0)
    assert [times.quantile(0, q) for q in (0.0, 0.25, 0.5, 0.51, 0.75, 1.0)] == [1.0, 1.0, 2.0, 3.0, 3.0, 4.0]
    assert quantile([5.0], 0.5) == 5.0
