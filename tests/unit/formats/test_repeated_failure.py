"""What fails again and again is said at once, then once a minute, and when it is over."""

from tests.manual_clock import ManualClock
from torchquorum.formats.repeated_failure import RepeatedFailure


def test_a_failure_is_said_at_once_then_every_minute_and_its_end_once() -> None:
    said: list[str] = []
    clock = ManualClock()
    trouble = RepeatedFailure(said.append, clock)
    trouble.over("never said: nothing has failed")
    for _ in range(130):
        trouble.tell("full")
        clock.advance(1.0)
    assert said == ["full", "full (for 60 s now)", "full (for 120 s now)"]
    assert trouble.lasts and trouble.since_s == 130.0
    trouble.over("goes on")
    trouble.over("goes on")
    assert said[3:] == ["goes on"] and not trouble.lasts and trouble.since_s == 0.0
    trouble.tell("full")
    assert said[4:] == ["full"]
