"""Who may be at another place in its program than the others, and who goes on when all wait."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchquorum.rules import Async, Bounded, Rule, Sync
from torchquorum.rules.out_of_step import OutOfStep
from torchquorum.rules.track import Track

G, D = 0, 1


@dataclass
class Walker:
    out_of_step: bool = False
    seen_in: set[int] = field(default_factory=set)


def tracks(*rules: Rule) -> list[Track]:
    return [Track(k, rule, 2, 0) for k, rule in enumerate(rules)]


def test_who_joins_a_run_under_way_may_be_out_of_step_and_who_begins_with_it_is_not() -> None:
    of, late, first = OutOfStep(tracks(Sync(), Sync()), begun=False), Walker(), Walker()
    of.joined(first)
    assert not first.out_of_step
    of.begun = True
    of.joined(late)
    assert late.out_of_step


def test_with_one_optimizer_nobody_is() -> None:
    of, walker = OutOfStep(tracks(Sync()), begun=True), Walker()
    of.joined(walker)
    of.lost(walker)
    assert not walker.out_of_step


def test_a_round_of_all_in_every_track_that_makes_workers_wait_puts_one_in_step() -> None:
    a, b = Walker(), Walker()
    sync, bounded, free = tracks(Sync(), Bounded(0), Async())
    of = OutOfStep([sync, bounded, free], begun=True)
    of.lost(a)
    of.applied(sync, [a, b], 2)
    assert a.out_of_step and a.seen_in == {0}
    of.applied(bounded, [a], 2)  # a round of its own says nothing of the others
    of.applied(free, [a, b], 2)
    assert a.out_of_step
    of.applied(bounded, [a, b], 2)
    assert not a.out_of_step
    of.lost(a)
    assert a.out_of_step and a.seen_in == set()


def test_those_out_of_step_go_on_but_not_in_the_fullest_round() -> None:
    first, second = tracks(Sync(), Sync())
    of, a, b = OutOfStep([first, second], begun=True), Walker(), Walker()
    assert of.who_goes({G: [(0, a)], D: [(1, b)]}) == []
    of.lost(a)
    of.lost(b)
    a.out_of_step = b.out_of_step = True
    assert of.who_goes({G: [(0, a)], D: [(1, b)]}) == [1]  # both are as full: the first one stays
    b.out_of_step = False
    assert of.who_goes({G: [(0, a)], D: [(1, b)]}) == [0]


def test_they_go_on_256_times_without_an_update_and_no_more() -> None:
    first, second = tracks(Sync(), Sync())
    of, a, b = OutOfStep([first, second], begun=True), Walker(), Walker()
    of.lost(a)
    waiting = {G: [(0, a)], D: [(1, b)]}
    assert [of.who_goes(waiting) for _ in range(257)] == [[0]] * 256 + [[]]
    of.applied(first, [b], 2)
    assert [of.who_goes(waiting) for _ in range(257)] == [[0]] * 256 + [[]]
