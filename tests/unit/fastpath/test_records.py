"""Records of gradients between real processes: read in order, each once, and never overwritten before."""

import os
from collections.abc import Callable, Iterator

import pytest

from torchquorum.fastpath.page import FastPage
from torchquorum.fastpath.records import RECORDS, GradientId
from torchquorum.memory.lock import supported
from torchquorum.rules.quorum import Key

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")


def gradient(step: int) -> GradientId:
    return GradientId(incarnation=7, local_step=step, request=step + 10, computed_at=step - 1, norm=step * 1.5)


def in_child(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@pytest.fixture
def page() -> Iterator[FastPage]:
    """The page of three workers."""
    page = FastPage.create(3, 1)
    yield page
    page.close()


def test_another_process_sees_what_was_recorded_in_order(page: FastPage) -> None:
    def make() -> None:
        for step in range(1, 6):
            with page.locked(5.0) as held:
                assert held
                page.records.add(1, gradient(step), None if step == 3 else step / 2, step, 4)
                page.publish(step, 4)

    in_child(make)
    assert (page.version, page.slot) == (5, 4)
    records = page.records.drain()
    assert [(r.key, r.request, r.computed_at, r.version, r.slot) for r in records] == [
        (Key(1, 7, s), s + 10, s - 1, s, 4) for s in range(1, 6)
    ]
    assert [r.loss for r in records] == [0.5, 1.0, None, 2.0, 2.5]
    assert [r.norm for r in records] == [1.5, 3.0, 4.5, 6.0, 7.5]


def test_the_ps_reads_each_record_once_also_while_workers_append(page: FastPage) -> None:
    records = page.records
    records.add(1, gradient(6), None, 6, 4)
    known = records.added
    records.add(1, gradient(7), None, 7, 4)  # while the ps reads what it knows of
    assert [r.local_step for r in records.drain(known)] == [6] and records.pending
    assert [r.local_step for r in records.drain()] == [7]
    assert not records.pending and records.drain() == []


def test_records_that_the_ps_has_not_read_are_never_overwritten(page: FastPage) -> None:
    records = page.records
    most = records.room
    assert most == RECORDS - 3
    for worker in range(3):
        records.give(worker, gradient(1000 + worker), None, 1)
    for step in range(1, most + 1):
        records.add(0, gradient(step), None, step, 0)
    assert records.room == 0
    assert [r.local_step for r in records.drain()] == list(range(1, most + 1))
    assert [r.local_step for r in records.given()] == [1000, 1001, 1002]
    assert records.room == most


def test_a_round_is_recorded_in_order_of_worker(page: FastPage) -> None:
    for worker in (2, 0, 1):
        page.records.give(worker, gradient(worker + 1), None, 1)
    assert [r.worker for r in page.records.given()] == [0, 1, 2]
    for worker in range(3):
        page.records.add_given(worker, 5)
    found = [(r.worker, r.local_step, r.version, r.slot) for r in page.records.drain()]
    assert found == [(w, w + 1, 1, 5) for w in range(3)]
