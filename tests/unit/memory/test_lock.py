"""Locks and signals between real processes: the lock survives its holder, and waits end."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from torchquorum.memory.lock import LOCK_BYTES, SharedLock, Signal, supported
from torchquorum.memory.segments import Segment

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")


@pytest.fixture
def memory() -> Iterator[int]:
    """The address of shared memory."""
    segment = Segment.create("test", 4096)
    yield segment.bytes.data_ptr()
    segment.close()


def child(work: Callable[[], None]) -> int:
    """Forks a process that does something and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def test_a_lock_whose_holder_was_killed_goes_to_the_next(memory: int) -> None:
    lock = SharedLock(memory, create=True)
    read, write = os.pipe()

    def hold() -> None:
        with lock as held:
            os.write(write, b"y" if held else b"n")
            time.sleep(60)

    pid = child(hold)
    try:
        assert os.read(read, 1) == b"y"
        lock.timeout_s = 0.05
        with lock as held:
            assert not held
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
    lock.timeout_s = 5.0
    for _ in range(2):
        with lock as held:
            assert held


def test_who_waits_is_woken_and_who_is_not_woken_wakes_in_time(memory: int) -> None:
    news = Signal(memory + LOCK_BYTES)
    seen = news.begin_wait()
    started = time.monotonic()
    news.wait(seen, 0.05)
    assert time.monotonic() - started >= 0.04
    thread = threading.Thread(target=news.wait, args=(seen, 60.0))
    thread.start()
    news.announce()
    news.wake()  # whether it sleeps already or not: the number has changed
    thread.join(30)
    assert not thread.is_alive()
    news.wait(seen, 60.0)  # the number that it has seen is an old one
    assert news.waiters == 1
    news.end_wait()
    assert news.waiters == 0


def test_a_process_that_waits_is_woken_by_another(memory: int) -> None:
    news = Signal(memory)
    seen = news.begin_wait()
    other = Signal(memory)

    def announce() -> None:
        other.announce()
        other.wake()

    pid = child(announce)
    news.wait(seen, 60.0)
    os.waitpid(pid, 0)
    assert news.begin_wait() != seen
