"""Places at the board: no more take turns than there are cores, those who come straight back stay, and nobody sleeps for ever."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from torchquorum.transport.board import CLOSED, OPEN, Board
from torchquorum.transport.shared_lock import supported
from torchquorum.worker import places
from torchquorum.worker.places import Places

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")
DEADLINE_S = 60.0


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    """An open board of four workers on a host of two cores, where nobody looks up unless it is called."""
    monkeypatch.setattr(places, "usable_cores", lambda: 2)
    monkeypatch.setattr(places, "LOOK_S", DEADLINE_S)
    board = Board.create(4, 1)
    board.state, board.era, board.writer = OPEN, 1, -1
    board.publish(0, 0)
    yield board
    board.close()


def of(board: Board, worker: int) -> Places:
    return Places(board, worker, wait_s=DEADLINE_S)


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def turned(place: Places) -> None:
    place.turned()
    place.wake()


class Coming(threading.Thread):
    """A worker that waits for a place."""

    def __init__(self, place: Places, board: Board | None = None) -> None:
        super().__init__()
        self.place, self.came, asleep = place, False, board.queue if board else 0
        self.start()
        if board is not None:
            until(lambda: board.queue > asleep)

    def run(self) -> None:
        self.came = self.place.come()


def test_who_finds_no_place_sleeps_until_one_goes(board: Board) -> None:
    first, second = of(board, 0), of(board, 1)
    assert first.come() and second.come() and board.standing() == 2
    sleeping = [Coming(of(board, 2), board), Coming(of(board, 3), board)]
    assert board.queue == 2 and not (board.stands(2) or board.stands(3))
    turned(first)  # it has been away for long, as one that computes, so it goes
    until(lambda: sleeping[0].came or sleeping[1].came)
    until(lambda: board.queue == 1)
    assert not board.stands(0) and board.stands(2) != board.stands(3)
    second.give_up()
    for one in sleeping:
        one.join(DEADLINE_S)
        assert one.came
    assert board.queue == 0 and board.stands(2) and board.stands(3) and board.standing() == 2


def test_who_comes_straight_back_stays_and_after_a_while_gives_its_place_to_who_sleeps(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "STRAIGHT_S", DEADLINE_S)
    monkeypatch.setattr(places, "STAY_S", DEADLINE_S)
    busy, other = of(board, 0), of(board, 1)
    assert other.come()
    busy.leave()
    busy.arrive()
    assert busy.come()
    asleep = Coming(of(board, 2), board)
    for _ in range(3):
        turned(busy)
        busy.leave()
        busy.arrive()
        assert busy.come() and board.stands(0) and asleep.is_alive()
    monkeypatch.setattr(places, "STAY_S", 0.0)
    monkeypatch.setattr(places, "COME_S", DEADLINE_S)
    assert busy.come() and busy.come()  # it has called, and goes on until whoever it called is awake
    asleep.join(DEADLINE_S)
    assert asleep.came and board.stands(2) and not board.stands(0)
    busy._goes_at = 0.0
    back = Coming(busy)
    turned(asleep.place)  # it was away for long
    back.join(DEADLINE_S)
    assert back.came and board.stands(0)


def test_with_nobody_asleep_who_is_straight_back_stays_for_as_long_as_it_likes(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "STAY_S", 0.0)
    place = of(board, 0)
    assert place.come() and place.come() and board.standing() == 1


def test_who_sleeps_looks_up_and_comes_if_nobody_makes_use_of_the_turn(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of(board, 0).come() and of(board, 1).come()  # and then they die, or compute without having said so
    board.writer = 3  # a long update is use too
    monkeypatch.setattr(places, "LOOK_S", 0.001)
    waiting = Coming(of(board, 2), board)
    waiting.join(0.2)
    assert waiting.is_alive() and not board.stands(2)
    board.writer = -1
    waiting.join(DEADLINE_S)
    assert waiting.came and board.stands(2) and board.standing() == 1


def test_a_place_is_not_waited_for_longer_than_asked(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "LOOK_S", 0.01)
    assert of(board, 0).come() and of(board, 1).come()
    board.writer = 0
    assert not Places(board, 2, wait_s=0.02).come()
    assert board.queue == 0 and not board.stands(2)


def test_a_board_that_is_closed_for_a_moment_is_waited_for_and_one_that_stays_closed_is_not(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "REOPENED_S", DEADLINE_S)
    place, seen = of(board, 0), []
    board.state = CLOSED
    waiting = threading.Thread(target=lambda: seen.append(place.opened()))
    waiting.start()
    until(lambda: board.waiters == 1)
    board.state = OPEN
    board.announce()
    board.wake()
    waiting.join(DEADLINE_S)
    assert seen == [True] and board.waiters == 0
    board.state = CLOSED
    monkeypatch.setattr(places, "REOPENED_S", 0.01)
    assert not place.opened()
    monkeypatch.setattr(places, "REOPENED_S", 10 * DEADLINE_S)
    started = time.monotonic()
    assert not place.opened()  # in this era it has waited once
    assert time.monotonic() - started < DEADLINE_S
    monkeypatch.setattr(places, "REOPENED_S", 0.01)
    assert not of(board, 1).come()
    assert board.standing() == 0 and board.queue == 0


def test_after_an_opening_one_call_brings_as_many_as_there_are_places(board: Board) -> None:
    assert of(board, 0).come() and of(board, 1).come()
    sleeping = [Coming(of(board, 2), board), Coming(of(board, 3), board)]
    for worker in range(4):
        board.stand(worker, there=False)  # as the ps does when it opens
    board.call()
    board.wake_queue()
    for one in sleeping:
        one.join(DEADLINE_S)
        assert one.came
    assert board.standing() == 2


def test_with_a_core_for_each_there_is_a_place_for_each(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "usable_cores", lambda: 4)
    assert all(of(board, worker).come() for worker in range(4))
    assert board.standing() == 0, "nobody needs one"
