"""Slots of shared memory: equal parts, each with a number that says what it holds."""

import pytest
import torch

from torchquorum.errors import SegmentError
from torchquorum.memory.segments import Segment
from torchquorum.memory.slots import Slots, region_bytes, section_views
from torchquorum.placement.layout import Region, Variable, place

MIXED = [
    Variable(name="wide", shape=(3,), dtype="float64"),
    Variable(name="plain", shape=(5,), dtype="float32"),
    Variable(name="narrow", shape=(2,), dtype="bfloat16"),
]


def region(variables: list[Variable]) -> Region:
    return place(variables, 1).trained[0]


def test_sections_are_typed_views_of_the_same_bytes() -> None:
    memory = torch.zeros(region(MIXED).size_bytes, dtype=torch.uint8)
    views = section_views(region(MIXED), memory)
    assert [view.dtype for view in views] == [torch.float64, torch.float32, torch.bfloat16]
    views[1].fill_(1.5)
    assert section_views(region(MIXED), memory)[1].eq(1.5).all() and not views[0].any()


@pytest.mark.parametrize("variables", [MIXED, MIXED[:1]])
def test_the_bytes_of_sections_are_those_of_a_slot(variables: list[Variable]) -> None:
    memory = torch.randint(0, 100, (region(variables).size_bytes,), dtype=torch.uint8)
    found = region_bytes(region(variables), section_views(region(variables), memory))
    expected = torch.zeros_like(memory)
    for section in region(variables).sections:
        there = slice(section.start_byte, section.start_byte + section.size_bytes)
        expected[there] = memory[there]
    assert bytes(found) == bytes(expected.numpy())
    assert not found.flags.writeable


def test_another_process_sees_values_and_numbers() -> None:
    mine = Slots.create("test", region(MIXED), 3)
    try:
        assert [mine.holds(k, -1) for k in range(3)] == [True] * 3
        theirs = Slots.open(mine.ref, region(MIXED))
        mine.sections[2][1].fill_(4.0)
        mine.mark(2, 17)
        assert len(theirs) == 3 and theirs.holds(2, 17) and theirs.sections[2][1].eq(4.0).all()
        theirs.close()
    finally:
        mine.close()


def test_memory_that_is_too_small_is_refused() -> None:
    segment = Segment.create("test", 4096)
    try:
        with pytest.raises(SegmentError, match="shared memory of 4096 bytes is too small for 2 slots"):
            Slots(segment, region(MIXED), 2)
    finally:
        segment.close()
