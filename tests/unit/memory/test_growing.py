"""Arrays that grow in place."""

import resource

import numpy as np

from torchquorum.memory.growing import Growing, reservable_bytes


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_a_page_costs_memory_only_when_it_is_written() -> None:
    before = resident()
    array = Growing(np.float32)
    assert array.array.nbytes >= reservable_bytes() // 2
    assert resident() - before < 8 << 20
    array.array[: 4 << 20] = 1.0
    assert 15 << 20 < resident() - before < 40 << 20


def test_what_is_forgotten_reads_as_zeros_and_costs_nothing() -> None:
    array = Growing(np.int32, 4 << 20)
    array.array[:] = 7
    before = resident()
    array.forget(1000, 4_000_000)
    assert resident() - before < -(14 << 20)
    assert not array.array[1000:4_000_000].any()
    assert (array.array[:1000] == 7).all() and (array.array[4_000_000:] == 7).all()


def test_a_few_elements_are_forgotten_too() -> None:
    array = Growing(np.int32, 4096)
    array.array[:] = 7
    array.forget(3, 9)
    assert array.array[:12].tolist() == [7, 7, 7, 0, 0, 0, 0, 0, 0, 7, 7, 7]
