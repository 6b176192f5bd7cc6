"""Some of the exceptions and exits; `make chaos-beside` runs all of them."""

from concurrent.futures import ThreadPoolExecutor

from tests.chaos.exits import CELLS, ExitCell, run_exit_cell

RUN = (
    ExitCell("chief", "sys.exit(3)", "sync", "before the first step"),
    ExitCell("chief", "an exception", "async", "at the end"),
    ExitCell("worker", "a DataLoader", "sync", "in the middle"),
    ExitCell("chief", "os._exit(3)", "sync", "in the middle"),
)


def test_exceptions_and_exits_come_to_their_codes_and_the_run_is_saved() -> None:
    assert set(RUN) < set(CELLS)
    with ThreadPoolExecutor(4) as pool:
        failed = [f"{r.cell}: {r.problem}" for r in pool.map(run_exit_cell, RUN) if r.problem]
    assert not failed, "\n\n".join(failed)
