"""Mistakes that are made on purpose: the hunt finds each of them, and the explorer those of the fast path."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.hunt.__main__ import hunt
from tests.hunt.explorer import RULES, explore
from tests.hunt.fastpath_model import Budget, Lock
from tests.hunt.observe import replaced
from tests.hunt.planted import MISTAKES
from tests.hunt.shrink import invariant_of, shrink, tell
from torchquorum.fastpath import host, rounds, turns
from torchquorum.fastpath.page import CLOSED, GONE, NOBODY
from torchquorum.fastpath.participant import MadeVersion, Participant
from torchquorum.fastpath.records import RecordRing
from torchquorum.fastpath.stages import Stage

MINUTE_S = 60.0

# Where a hunt that finds each of them soon may begin, so that the suite need not play the runs before it.
FROM = {
    "fence_of_the_dead_dropped": 173,
    "update_applied_twice": 1,
    "repeated_push_counted_again": 102,
    "answer_before_its_record": 149,
    "record_after_its_version": 54,
    "old_generation_believed": 1,
    "half_a_version_published": 1,
    "departure_by_exception_is_no_death": 7,
    "answer_sent_again_on_its_way": 8,
}


def test_every_mistake_is_looked_for() -> None:
    assert set(FROM) == set(MISTAKES)


# These are found in a second or two; the others may take a minute.
SOON = {"update_applied_twice", "half_a_version_published", "answer_sent_again_on_its_way"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SOON else pytest.mark.long) for n in FROM])
def test_a_planted_mistake_is_found_within_a_minute(name: str) -> None:
    with MISTAKES[name]():
        found = hunt(FROM[name], seconds=MINUTE_S, clock=time.process_time)
        assert found.found is not None, f"{found.runs} runs, and nothing was found"


@pytest.mark.long
def test_a_finding_is_cut_down_to_what_it_needs_and_told() -> None:
    with MISTAKES["record_after_its_version"]():
        found = hunt(FROM["record_after_its_version"], seconds=MINUTE_S, clock=time.process_time).found
        assert found is not None
        least = shrink(found)
    assert invariant_of(least.broken) == invariant_of(found.broken)
    assert len(least.schedule.faults) <= min(2, len(found.schedule.faults))
    text = tell(least)
    assert f"seed {least.schedule.config.seed}: " in text and "BROKEN: " in text and "FAULT: " in text


def _take_anyway(lock: Lock) -> bool:
    """Takes a lock that a frozen process holds."""
    lock._model.owner = lock._who
    return True


# -- the fast path ----------------------------------------------------------------------------------------------------


@contextmanager
def version_before_its_record() -> Iterator[None]:
    """A turn's version is published, and only then recorded."""

    def hasty(self: Any, turn: Any, gradient: Any, loss: Any) -> Any:
        user, page, version, target = self._user, self._user.page, turn.version + 1, turn.slots.target
        yield Stage.LOCK
        with page.locked() as held:
            if not (held and user.still_in(turn.opening_id) and page.words.writer == user.worker):
                self.done()
                return None
            user.versions.mark(target, version)
            page.publish(version, target, turn.slots.state_target)
            yield Stage.LOCKED
            page.records.add(user.worker, gradient, loss, version, target)
            page.words.writer = NOBODY
            page.news.announce()
        page.news.wake(1)
        return MadeVersion(turn.version, version, target, page.rates.of(version), turn.rates)

    with replaced(turns.TurnSteps, "_publish", hasty):
        yield


@contextmanager
def opening_not_looked_at() -> Iterator[None]:
    """A worker that was frozen publishes into another opening than it began in."""
    with replaced(Participant, "still_in", lambda user, opening_id: True):
        yield


@contextmanager
def slot_in_use_taken() -> Iterator[None]:
    """A worker writes into a slot that another one still reads."""
    with replaced(Participant, "free_slot", lambda user, current: 1 if current == 0 else 0):
        yield


@contextmanager
def page_opened_under_a_frozen_worker() -> Iterator[None]:
    """A page that was closed while a frozen worker held the lock is opened again."""
    close = host.FastPathHost.close

    def forgiving(self: Any) -> Any:
        found, words = close(self), self._page.words
        words.state = CLOSED if words.state == GONE else words.state
        return found

    with replaced(host.FastPathHost, "close", forgiving), replaced(Lock, "__enter__", _take_anyway):
        yield


@contextmanager
def round_recorded_in_part() -> Iterator[None]:
    """The last worker of a round publishes before it has recorded the others' gradients."""
    finish = rounds.RoundSteps._finish

    def hasty(self: Any, version: int, target: int, opening_id: int) -> Any:
        add = RecordRing.add_given

        def first_only(ring: RecordRing, worker: int, slot: int) -> None:
            if worker == 0:
                add(ring, worker, slot)

        with replaced(RecordRing, "add_given", first_only):
            return (yield from finish(self, version, target, opening_id))

    with replaced(rounds.RoundSteps, "_finish", hasty):
        yield


FAST = {
    version_before_its_record: ("async", Budget(deaths=1)),
    opening_not_looked_at: ("async", Budget(freezes=1, closings=1)),
    slot_in_use_taken: ("async", Budget()),
    page_opened_under_a_frozen_worker: ("async", Budget(freezes=1)),
    round_recorded_in_part: ("sync", Budget()),
}


@pytest.mark.parametrize("mistake", FAST, ids=lambda mistake: mistake.__name__)
def test_a_planted_mistake_of_the_fast_path_is_found(mistake: Any) -> None:
    rule, budget = FAST[mistake]
    with mistake():
        found = explore(RULES[rule], 2, 2, budget, most_states=20_000)
    assert found.broken is not None, f"{found.states} states, and nothing was found"
