"""Time as a loop sees it: a pause of the task itself does not count."""

from tests.manual_clock import ManualClock
from torchquorum.clock import SeenTime


def test_time_in_which_a_loop_turns_counts_as_it_passes() -> None:
    clock = ManualClock()
    seen = SeenTime(clock, 2.0)
    for _ in range(100):
        clock.advance(0.5)
        assert seen.now() == clock.now()
        assert seen.turn() == clock.now()


def test_of_a_pause_only_what_a_turn_may_take_counts_however_long_it_was() -> None:
    clock = ManualClock(0.0)
    seen = SeenTime(clock, 2.0)
    clock.advance(1.0)
    assert seen.turn() == 1.0
    clock.advance(400.0)
    assert seen.now() == seen.turn() == seen.now() == 3.0
    clock.advance(1.0)
    assert seen.now() == seen.turn() == 4.0
    clock.advance(40.0)
    assert seen.now() == seen.turn() == 6.0


def test_a_thread_that_looks_before_the_loop_has_turned_sees_no_more_than_the_loop_will() -> None:
    clock = ManualClock(0.0)
    seen = SeenTime(clock, 2.0)
    clock.advance(400.0)
    early = seen.now()
    clock.advance(5.0)
    assert early <= seen.now() <= seen.turn()
