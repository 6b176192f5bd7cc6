"""The tables of the page: each worker's own words, and learning rates for longer than the table is."""

from torchquorum.fastpath.page_tables import RATES, RateTable, WorkerColumns
from torchquorum.wire.messages import MemoryRef


def test_rates_are_those_of_their_update_also_when_the_table_is_written_again() -> None:
    rates = RateTable(memoryview(bytearray(RateTable.size_bytes(3))), 3)
    rates.begin(100)
    last = 100 + RATES + 50
    for update in range(100, last):
        rates.add([update, update / 2, -1.0])
    assert rates.known == last
    assert rates.of(last - 1) == [last - 1, (last - 1) / 2, -1.0]
    assert rates.of(last - RATES) == [last - RATES, (last - RATES) / 2, -1.0]


def table(num_workers: int) -> WorkerColumns:
    made = WorkerColumns(memoryview(bytearray(WorkerColumns.size_bytes(num_workers))), num_workers)
    for worker in range(num_workers):
        made.release_slots(worker)
    return made


def test_slots_in_use_or_leased_are_busy_until_they_are_released() -> None:
    workers = table(2)
    workers.uses[0], workers.leases[1] = 3, 6
    assert set(workers.busy_slots()) == {3, 6, -1}
    workers.release_slots(0)
    assert set(workers.busy_slots()) == {6, -1}


def test_a_worker_is_alone_when_no_other_is_admitted() -> None:
    workers, memory = table(3), MemoryRef(1, 2, 3, 4)
    workers.admit(1, 77, memory)
    assert workers.alone(1) and not workers.alone(0)
    assert workers.tokens.tolist() == [0, 77, 0] and workers.gradients(1) == memory
    workers.admit(2, 78, memory)
    assert not workers.alone(1)
    workers.admit(2, 0, None)
    assert workers.alone(1) and workers.gradients(2) == MemoryRef(0, 0, 0, 0)


def test_a_round_is_full_and_written_when_all_have_given_and_written() -> None:
    workers = table(2)
    workers.begin_rounds()
    workers.given[0] = workers.written[1] = 5
    assert not workers.all_given(5) and not workers.all_written(5)
    workers.given[1] = workers.written[0] = 5
    assert workers.all_given(5) and workers.all_written(5) and not workers.all_given(4)
    workers.begin_rounds()
    assert not workers.all_given(5) and not workers.all_written(5)


def test_seats_are_counted() -> None:
    workers = table(3)
    workers.seats[0] = workers.seats[2] = 1
    assert workers.seated() == 2
    workers.clear_seats()
    assert workers.seated() == 0
