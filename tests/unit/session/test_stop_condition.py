"""When a run is over, on a clock that the test sets."""

from tests.manual_clock import ManualClock
from torchquorum.session.config import StopOptions
from torchquorum.session.stop_condition import StopCondition


def test_a_number_of_steps_becomes_the_last_step_once() -> None:
    stop = StopCondition(StopOptions(num_steps=5))
    stop.end_at(3)  # a hook's last step does not replace it
    assert stop.last_step is None
    stop.count_from(10)
    stop.count_from(100)  # a recovery does not start it anew
    assert stop.last_step == 15


def test_a_last_step_of_the_options_wins_over_that_of_a_hook() -> None:
    stop = StopCondition(StopOptions(last_step=5))
    stop.end_at(3)
    assert stop.last_step == 5
    stop = StopCondition(StopOptions())
    stop.end_at(3)
    assert stop.last_step == 3


def test_the_time_of_a_run_is_counted_from_its_start() -> None:
    clock = ManualClock()
    stop = StopCondition(StopOptions(max_seconds=10.0), clock)
    clock.sleep(9.0)
    stop.start_clock()
    clock.sleep(9.0)
    assert not stop.is_late
    clock.sleep(2.0)
    assert stop.is_late
    assert not StopCondition(StopOptions(), clock).is_late
