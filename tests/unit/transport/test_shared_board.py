"""The board between real processes: the lock survives its holder, waits end, nothing that was recorded is lost."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from torchquorum.transport.board import OPEN, RECORDS, Board, Given
from torchquorum.transport.shared_lock import supported

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")


def child(work: Callable[[], None]) -> int:
    """Forks a process that does something and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def given(step: int) -> Given:
    return Given(incarnation=7, local_step=step, request=step + 10, computed_at=step - 1)


def test_a_lock_whose_holder_was_killed_goes_to_the_next() -> None:
    board = Board.create(2, 1)
    read, write = os.pipe()

    def hold() -> None:
        with board.locked() as held:
            os.write(write, b"y" if held else b"n")
            time.sleep(60)

    pid = child(hold)
    try:
        assert os.read(read, 1) == b"y"
        with board.locked(0.05) as held:
            assert not held
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
    for _ in range(2):
        with board.locked(5.0) as held:
            assert held
    board.close()


def test_another_process_sees_what_was_recorded_in_order() -> None:
    board = Board.create(2, 1)

    def make() -> None:
        for step in range(1, 6):
            with board.locked(5.0) as held:
                assert held
                board.record(1, given(step), None if step == 3 else step / 2, step, 4)
                board.publish(step, 4)

    os.waitpid(child(make), 0)
    assert (board.version, board.slot) == (5, 4)
    records = board.drain()
    assert [(r.worker, r.incarnation, r.local_step, r.request, r.computed_at, r.version, r.slot) for r in records] == [
        (1, 7, s, s + 10, s - 1, s, 4) for s in range(1, 6)
    ]
    assert [r.loss for r in records] == [0.5, 1.0, None, 2.0, 2.5]
    assert not board.undrained and board.drain() == []
    board.record(1, given(6), None, 6, 4)
    known = board.recorded
    board.record(1, given(7), None, 7, 4)  # while the ps reads what it knows of
    assert [r.local_step for r in board.drain(known)] == [6] and board.undrained
    assert [r.local_step for r in board.drain()] == [7]
    board.close()


def test_records_that_nobody_took_up_are_never_overwritten() -> None:
    board = Board.create(3, 1)
    most = board.room()
    assert most == RECORDS - 3
    for step in range(1, most + 1):
        board.record(0, given(step), None, step, 0)
    assert board.room() == 0
    assert [r.local_step for r in board.drain()] == list(range(1, most + 1))
    assert board.room() == most
    board.close()


def test_a_round_is_recorded_in_order_of_worker() -> None:
    board = Board.create(3, 1)
    for worker in (2, 0, 1):
        board.give(worker, given(worker + 1), None, 1)
    assert [r.worker for r in board.round()] == [0, 1, 2]
    board.record_round(1, 5)
    assert [(r.worker, r.local_step, r.version, r.slot) for r in board.drain()] == [(w, w + 1, 1, 5) for w in range(3)]
    board.close()


def test_who_waits_is_woken_and_who_is_not_woken_wakes_in_time() -> None:
    board = Board.create(1, 1)
    seen = board.begin_wait()
    started = time.monotonic()
    board.wait(seen, 0.05)
    assert time.monotonic() - started >= 0.04
    thread = threading.Thread(target=board.wait, args=(seen, 60.0))
    thread.start()
    board.begin_wait()
    board.announce()
    board.wake()  # whether it sleeps already or not: the signal has changed
    thread.join(30)
    assert not thread.is_alive()
    board.wait(seen, 60.0)  # the signal that it has seen is an old one
    board.close()


def test_rates_and_slots_are_each_workers_own() -> None:
    board = Board.create(2, 3)
    board.begin_rates(100)
    for update in range(100, 9000):
        board.rate(update, [update, update / 2, -1.0])
    assert board.rated == 9000 and board.rates(8999) == [8999.0, 4499.5, -1.0]
    board.use(0, 3)
    board.lease(1, 6)
    assert set(board.busy()) == {3, 6, -1}
    board.release_slots(0)
    assert set(board.busy()) == {6, -1}
    board.state = OPEN
    board.close()
    assert board.state != OPEN
