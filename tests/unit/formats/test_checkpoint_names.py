"""Whether a writer is dead or its files are old, by the clock that is given."""

import os

from tests.manual_clock import ManualClock
from torchquorum.formats.checkpoint_names import STALE_S, is_abandoned, this_host


def test_files_of_another_host_are_abandoned_when_they_are_old_by_the_clock() -> None:
    clock = ManualClock(50_000.0)
    assert not is_abandoned("elsewhere", 1, 50_000.0, clock)
    clock.advance(STALE_S)
    assert not is_abandoned("elsewhere", 1, 50_000.0, clock)
    clock.advance(1.0)
    assert is_abandoned("elsewhere", 1, 50_000.0, clock)


def test_files_of_a_process_that_lives_here_are_abandoned_only_when_they_are_old() -> None:
    clock = ManualClock(50_000.0)
    assert not is_abandoned(this_host(), os.getpid(), 50_000.0, clock)


def test_files_of_a_process_of_this_host_that_is_gone_are_abandoned_at_once() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert is_abandoned(this_host(), child, 50_000.0, ManualClock(50_000.0))
