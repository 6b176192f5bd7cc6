"""The page: what one process writes another reads, times are those of the clock, and waits for news end."""

import threading
from collections.abc import Iterator

import pytest

from tests.manual_clock import ManualClock
from torchquorum.fastpath.page import CLOSED, GONE, NOBODY, OPEN, FastPage
from torchquorum.fastpath.participant import Participant
from torchquorum.memory.lock import supported

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")


@pytest.fixture
def clock() -> ManualClock:
    """A clock that a test can move on."""
    return ManualClock()


@pytest.fixture
def page(clock: ManualClock) -> Iterator[FastPage]:
    """The page of two workers and three parameter groups."""
    page = FastPage.create(2, 3, clock)
    yield page
    page.close()


def test_a_new_page_is_closed_and_nobody_uses_a_slot(page: FastPage) -> None:
    assert page.words.state == CLOSED and page.words.writer == NOBODY
    assert page.workers.busy_slots() == [-1] * 4


def test_of_an_abandoned_page_the_ps_leaves_every_slot_alone_that_a_worker_could_take(page: FastPage) -> None:
    page.workers.uses[0], page.workers.leases[1], page.workers.state_uses[0] = 3, 9, 2
    assert set(page.busy_slots()) == {-1, 3, 9} and set(page.busy_states()) == {-1, 2}
    page.abandon()  # a worker is frozen with the lock, and may go on with it at any time
    worker = Participant(page, 1, 1, versions=range(6), cores=1)  # pyright: ignore[reportArgumentType]
    assert worker.free_slot(page.slot) in page.busy_slots() and worker.free_state(page.state_slot) in page.busy_states()
    for used in range(5):  # also the last that it could come to
        page.workers.uses[0], page.workers.uses[1], page.workers.leases[0], page.workers.leases[1] = 1, 2, 3, used
        assert worker.free_slot(0) in page.busy_slots()
    assert page.words.state == GONE and 9 not in page.busy_slots()


def test_what_is_written_through_one_mapping_is_read_through_another(page: FastPage) -> None:
    other = FastPage.open(page.ref, 2, 3)
    page.publish(70_000, 65_535)
    page.words.limit = 1 << 46
    page.workers.tokens[1] = 2**62
    page.rates.add([0.1, 0.2, 0.3])
    assert (other.version, other.slot, other.words.limit) == (70_000, 65_535, 1 << 46)
    assert other.workers.tokens[1] == 2**62 and other.rates.of(0) == [0.1, 0.2, 0.3]
    with other.locked() as held:
        assert held
        with page.locked(0.01) as twice:
            assert not twice


def test_it_says_for_how_long_nothing_was_made_and_the_ps_was_silent(page: FastPage, clock: ManualClock) -> None:
    page.publish(1, 0)
    page.ps_looks()
    clock.advance(100.0)
    assert page.idle_s == page.ps_silent_s == 100.0
    page.ps_looks()
    assert (page.ps_silent_s, page.idle_s) == (0.0, 100.0)
    page.publish(2, 1)
    assert page.idle_s == 0.0


def test_a_wait_for_news_ends_with_the_news_and_leaves_no_waiter_behind(page: FastPage) -> None:
    found = []
    waiting = threading.Thread(target=lambda: found.append(page.wait_for_news(lambda: False, 60.0)))
    waiting.start()
    while not page.news.waiters:
        pass
    page.news.announce()
    page.news.wake()
    waiting.join(30.0)
    assert found == [True] and page.news.waiters == 0
    assert page.wait_for_news(lambda: True, 60.0), "what has been reached is not waited for"


def test_who_waits_when_the_ps_gives_the_page_up_is_woken(page: FastPage) -> None:
    waiting = threading.Thread(target=page.wait_for_news, args=(lambda: False, 60.0))
    page.words.state = OPEN
    waiting.start()
    while not page.news.waiters:
        pass
    page.close()
    waiting.join(30.0)
    assert not waiting.is_alive() and page.words.state == GONE
