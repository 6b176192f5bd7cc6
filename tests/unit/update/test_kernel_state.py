"""Slots of optimizer state: written in place where the ps is alone, from one slot to another beside workers."""

from torchquorum.memory.slots import Slots
from torchquorum.placement.layout import Variable, place
from torchquorum.update.kernel_state import KernelState

REGION = place([Variable(name="w", shape=(5,), dtype="float32")], 1).trained[0]


def test_without_workers_there_is_one_slot_and_it_is_written_in_place() -> None:
    state = KernelState(REGION, ["sum"], 0.5)
    assert state.next_slot() == state.current == 0 and state.refs == []
    assert state.of(0)[0][0][:5].tolist() == [0.5] * 5
    state.close()


def test_beside_workers_the_next_state_goes_into_a_slot_that_nobody_writes() -> None:
    state = KernelState(REGION, ["exp_avg", "exp_avg_sq"], 0.0, 4)
    try:
        assert state.next_slot() == 1
        state.also_busy = lambda: [1, -1]  # a worker that is frozen may still be writing there
        assert state.next_slot() == 2
        state.current = 2
        assert state.next_slot() == 0
    finally:
        state.close()


def test_another_process_sees_every_name_in_its_order() -> None:
    state = KernelState(REGION, ["exp_avg", "exp_avg_sq"], 0.0, 3)
    try:
        theirs = [Slots.open(ref, REGION) for ref in state.refs]
        state.of(2)[1][0].fill_(7.0)
        assert theirs[1].sections[2][0].eq(7.0).all() and not theirs[0].sections[2][0].any()
        for slots in theirs:
            slots.close()
    finally:
        state.close()


def test_an_optimizer_without_state_has_no_memory_for_it() -> None:
    state = KernelState(REGION, [], 0.0)
    assert state.of(0) == [] and state.next_slot() == 0
    state.close()
