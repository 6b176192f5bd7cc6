"""How the variables are cut into the workers' parts: each element is in one part, of its own parameter group."""

import pytest

from torchquorum.fastpath.rounds import parts_of
from torchquorum.placement.layout import Layout, Variable, place


def layout() -> Layout:
    shapes = [(300,), (7,), (64, 9), (1,), (1000,)]
    dtypes, groups = ["float32", "float32", "float64", "float32", "float64"], [0, 1, 0, 1, 1]
    named = zip("abcde", shapes, dtypes, groups, strict=True)
    return place([Variable(name=n, shape=s, dtype=d, group=g) for n, s, d, g in named], 1)


@pytest.mark.parametrize("chunk", [None, 1, 50, 64, 10_000])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_every_element_is_in_one_part_of_one_worker_and_in_its_group(workers: int, chunk: int | None) -> None:
    found = layout()
    region = found.trained[0]
    owners = [[-1] * section.numel for section in region.sections]
    for worker in range(workers):
        for part in parts_of(found, worker, workers, chunk):
            assert 0 < part.stop - part.start <= (chunk or 10_000)
            for k in range(part.start, part.stop):
                assert owners[part.section][k] == -1
                owners[part.section][k] = part.group
    for section, groups in zip(region.sections, owners, strict=True):
        assert -1 not in groups
        for piece in section.pieces:
            expected = found.variables[piece.variable].group
            assert set(groups[piece.offset : piece.offset + piece.numel]) == {expected}


def test_without_chunks_a_worker_has_one_part_for_each_group_and_section() -> None:
    assert [(p.section, p.group) for p in parts_of(layout(), 0, 1)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
