"""Refused connections: all are counted, a few are told."""

from tests.manual_clock import ManualClock
from torchquorum.wire.refusals import MOST_UNTOLD, Refusals


def test_a_flood_is_counted_and_told_in_one_line_every_few_seconds() -> None:
    clock, said = ManualClock(), []
    refusals = Refusals(said.append, every_s=10.0, clock=clock)
    refusals.report()
    assert said == []
    refusals.add("wrong secret", "192.0.2.1")
    refusals.report()
    for _ in range(3):
        refusals.add("too many connections", "192.0.2.2")
    refusals.add("wrong secret", "")
    clock.advance(9.0)
    refusals.report()
    assert said == ["turned a connection away: wrong secret, from 192.0.2.1"]
    clock.advance(1.0)
    refusals.report()
    refusals.report()
    assert said[1:] == ["turned a connection away: too many connections, from 192.0.2.2 (and 3 more)"]
    assert refusals.counts == {"wrong secret": 2, "too many connections": 3}


def test_of_those_refused_from_everywhere_only_so_many_addresses_are_kept() -> None:
    said: list[str] = []
    refusals = Refusals(said.append)
    for number in range(250):
        refusals.add("too many connections", f"127.0.1.{number}")
    assert said == [] and len(refusals.untold) == MOST_UNTOLD and refusals.untold.total() == 250
    assert refusals.counts == {"too many connections": 250}
