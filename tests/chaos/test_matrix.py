"""A part of the fault matrix, one cell per task and fault; `make chaos` runs all of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.cells import CELLS, DIAGONAL, FAULTS, MOMENTS, NAMESPACES, PAUSES, RULES, TABLE, TASKS
from tests.chaos.links import SMALLEST, measure
from tests.chaos.network import missing
from tests.chaos.runner import run_cell


def test_every_cell_has_an_outcome_and_the_diagonal_meets_every_row_rule_and_moment() -> None:
    every = len(TASKS) * len(FAULTS) * len(RULES) * len(MOMENTS)
    assert len(set(CELLS)) == len(CELLS) == every + len(PAUSES)
    assert {(cell.task, cell.fault) for cell in CELLS} == set(TABLE)
    assert {(cell.task, cell.fault) for cell in DIAGONAL} == {(t, f) for t in TASKS for f in FAULTS[:5]}
    assert {cell.rule for cell in DIAGONAL} == set(RULES) and {cell.moment for cell in DIAGONAL} == set(MOMENTS)


@pytest.mark.netns
def test_the_diagonal_of_the_matrix_comes_to_its_outcomes() -> None:
    cells = [cell for cell in DIAGONAL if not (missing() and cell.fault in NAMESPACES)]
    with ThreadPoolExecutor(5) as pool:
        link = pool.submit(measure, SMALLEST) if not missing() else None
        results = list(pool.map(lambda job: run_cell(job[1], job[0]), enumerate(cells)))
    failed = [f"{r.cell}: {r.problem}" for r in results if r.problem]
    if link is not None and (problem := link.result().problem):
        failed.append(f"{SMALLEST}: {problem}")
    assert not failed, "\n\n".join(failed)
