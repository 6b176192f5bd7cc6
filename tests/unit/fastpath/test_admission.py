"""Seats: no more workers take turns than there are cores, those that come straight back stay, and none sleeps forever."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.manual_clock import ManualClock
from torchquorum.clock import SYSTEM, Clock
from torchquorum.fastpath.admission import Admission, SeatTimes
from torchquorum.fastpath.page import CLOSED, NOBODY, OPEN, FastPage
from torchquorum.fastpath.participant import Participant
from torchquorum.memory.lock import supported
from torchquorum.memory.slots import Slots
from torchquorum.placement.layout import Variable, place

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")
DEADLINE_S = 60.0
REGION = place([Variable(name="a", shape=(1,), dtype="float32")], 1).trained[0]


class Host:
    """An open page of four workers on a host of two cores, where none looks up unless it is called."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.page = FastPage.create(4, 1, self.clock)
        self.versions = Slots.create("versions", REGION, 1)
        self.page.words.state, self.page.words.opening_id = OPEN, 1
        self.page.publish(0, 0)

    def seat(
        self,
        worker: int,
        *,
        cores: int = 2,
        wait_s: float = DEADLINE_S,
        clock: Clock | None = None,
        **times: float,
    ) -> Admission:
        """A worker's seat; unless it has another clock, time stands still for it."""
        user = Participant(self.page, worker, 1, self.versions, cores=cores, wait_s=wait_s)
        return Admission(user, times=SeatTimes(**{"look_s": DEADLINE_S, **times}), clock=clock or self.clock)

    @property
    def asleep(self) -> int:
        return self.page.queue.waiters

    @property
    def seated(self) -> set[int]:
        return {worker for worker, seat in enumerate(self.page.workers.seats) if seat}

    def close(self) -> None:
        self.page.close()
        self.versions.close()


@pytest.fixture
def host() -> Iterator[Host]:
    """See Host."""
    host = Host()
    yield host
    host.close()


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def turn_ends(seat: Admission) -> None:
    seat.turn_ends()
    seat.wake()


class Coming(threading.Thread):
    """A worker that waits for a seat."""

    def __init__(self, seat: Admission, host: Host, *, sleeps: bool = True) -> None:
        super().__init__()
        self.seat, self.came, asleep = seat, False, host.asleep
        self.start()
        if sleeps:
            until(lambda: host.asleep > asleep)

    def run(self) -> None:
        self.came = self.seat.come()


def test_who_finds_no_seat_sleeps_until_one_is_free(host: Host) -> None:
    first, second = host.seat(0), host.seat(1)
    assert first.come() and second.come() and host.seated == {0, 1}
    sleeping = [Coming(host.seat(2), host), Coming(host.seat(3), host)]
    assert host.asleep == 2 and host.seated == {0, 1}
    turn_ends(first)  # it was away for long, as one that computes, so it leaves its seat
    until(lambda: sleeping[0].came or sleeping[1].came)
    until(lambda: host.asleep == 1)
    assert host.seated in ({1, 2}, {1, 3})
    second.give_up()
    for one in sleeping:
        one.join(DEADLINE_S)
        assert one.came
    assert host.asleep == 0 and host.seated == {2, 3}


def test_who_comes_straight_back_stays_and_after_a_while_gives_its_seat_to_who_sleeps(host: Host) -> None:
    busy, other, third = (host.seat(worker, stay_s=10.0, come_s=5.0) for worker in range(3))
    assert other.come()
    busy.leave()
    busy.arrive()
    assert busy.come()
    asleep = Coming(third, host)
    for _ in range(3):
        turn_ends(busy)
        busy.leave()
        busy.arrive()
        assert busy.come() and host.seated == {0, 1} and asleep.is_alive()
    host.clock.advance(11.0)
    assert busy.come() and busy.come()  # it has called, and goes on until the one that it called is awake
    asleep.join(DEADLINE_S)
    assert asleep.came and host.seated == {1, 2}
    host.clock.advance(6.0)
    back = Coming(busy, host)
    turn_ends(asleep.seat)  # it was away for long
    back.join(DEADLINE_S)
    assert back.came and host.seated == {0, 1}


def test_with_nobody_asleep_who_is_straight_back_stays_for_as_long_as_it_likes(host: Host) -> None:
    seat = host.seat(0, stay_s=0.0)
    assert seat.come() and seat.come() and host.seated == {0}


def test_who_sleeps_looks_up_and_comes_if_nobody_makes_use_of_the_turn(host: Host) -> None:
    assert host.seat(0).come() and host.seat(1).come()  # and then they die, or compute without having said so
    host.page.words.writer = 3  # a long update is use, too
    host.clock.advance(1.0)  # since the last version
    waiting = Coming(host.seat(2, look_s=0.001), host)
    waiting.join(0.2)
    assert waiting.is_alive() and host.seated == {0, 1}
    host.page.words.writer = NOBODY
    waiting.join(DEADLINE_S)
    assert waiting.came and host.seated == {2}


def test_a_seat_is_not_waited_for_longer_than_asked(host: Host) -> None:
    assert host.seat(0).come() and host.seat(1).come()
    host.page.words.writer = 0
    assert not host.seat(2, wait_s=0.02, look_s=0.01, clock=SYSTEM).come()
    assert host.asleep == 0 and host.seated == {0, 1}


def test_a_page_that_is_closed_for_a_moment_is_waited_for(host: Host) -> None:
    seat, found = host.seat(0, reopened_s=DEADLINE_S), []
    host.page.words.state = CLOSED
    waiting = threading.Thread(target=lambda: found.append(seat.opened()))
    waiting.start()
    until(lambda: host.page.news.waiters == 1)
    host.page.words.state = OPEN
    host.page.news.announce()
    host.page.news.wake()
    waiting.join(DEADLINE_S)
    assert found == [True] and host.page.news.waiters == 0


def test_a_page_that_stays_closed_is_waited_for_once_after_every_opening(host: Host) -> None:
    host.page.words.state = CLOSED
    seat = host.seat(0, reopened_s=0.05, clock=SYSTEM)
    waits = []
    for opening_id in (1, 1, 1, 2, 2):
        host.page.words.opening_id = opening_id
        started = time.monotonic()
        assert not seat.opened()
        waits.append(time.monotonic() - started >= 0.05)
    assert waits == [True, False, False, True, False]
    assert not host.seat(1, reopened_s=0.01, clock=SYSTEM).come()
    assert host.seated == set() and host.asleep == 0


def test_after_an_opening_one_call_brings_as_many_as_there_are_seats(host: Host) -> None:
    assert host.seat(0).come() and host.seat(1).come()
    sleeping = [Coming(host.seat(2), host), Coming(host.seat(3), host)]
    host.page.workers.clear_seats()  # as the ps does when it opens
    host.page.queue.announce()
    host.page.queue.wake(1)
    for one in sleeping:
        one.join(DEADLINE_S)
        assert one.came
    assert host.seated == {2, 3}


def test_with_a_core_for_each_no_worker_needs_a_seat(host: Host) -> None:
    assert all(host.seat(worker, cores=4).come() for worker in range(4))
    assert host.seated == set()
