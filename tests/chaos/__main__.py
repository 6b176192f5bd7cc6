"""`make chaos`: runs the fault matrix, or the cells that -k names, and prints a table of what came of it.

python -m tests.chaos -k "ps and Sync"        only cells whose name has all these words
python -m tests.chaos -k disk                 only faults of disks, folders and files
python -m tests.chaos --part beside           only what is beside the matrix: pauses, slow transfers, exits, disks
python -m tests.chaos --jobs 8                so many cells at a time; they mostly wait
python -m tests.chaos --markdown FILE         also as a table for docs/faults.md
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.chaos.cells import CELLS, DIAGONAL, MOMENTS, NAMESPACES, PAUSES, RULES, TABLE, Cell
from tests.chaos.disks import CELLS as DISK_CELLS
from tests.chaos.disks import NEED_MOUNTS, can_mount, run_disk_cell
from tests.chaos.exits import CELLS as EXIT_CELLS
from tests.chaos.exits import ExitCell, run_exit_cell
from tests.chaos.links import CASES, SMALLEST, LinkCase, measure
from tests.chaos.network import missing
from tests.chaos.runner import Result, run_cell

Results = dict[object, Result]
SHORT = dict(zip(MOMENTS, ("first", "middle", "saving", "end"), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description="Run the fault matrix.")
    parser.add_argument("-k", default="", help="words that a cell's name must have, joined by 'and'; 'not' before one")
    parser.add_argument("--jobs", type=int, default=3 * (os.cpu_count() or 2), help="cells at a time [%(default)s]")
    parser.add_argument("--part", choices=["matrix", "beside", "all"], default="all", help="[%(default)s]")
    parser.add_argument("--diagonal", action="store_true", help="only the part that `make test` runs")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--keep", type=Path, help="keep every cell's folder in here")
    args = parser.parse_args()
    matrix, beside = args.part in ("matrix", "all"), args.part in ("beside", "all") and not args.diagonal
    cells = [*(CELLS[: -len(PAUSES)] if matrix else []), *(PAUSES if beside else [])]
    cells = [cell for cell in (DIAGONAL if args.diagonal else cells) if matches(str(cell), args.k)]
    links = [case for case in ([SMALLEST] if args.diagonal else CASES if beside else []) if matches(str(case), args.k)]
    if reason := missing():
        skipped = [cell for cell in cells if cell.fault in NAMESPACES]
        print(f"{len(skipped) + len(links)} cells between hosts are left out: {reason}")
        cells, links = [cell for cell in cells if cell not in skipped], []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the table is printed also then
    results: Results = {}
    began = time.monotonic()
    pool = ThreadPoolExecutor(args.jobs)
    try:
        jobs = [pool.submit(run_link, case, i) for i, case in enumerate(links)]
        jobs += [pool.submit(run_cell, cell, i, args.keep) for i, cell in enumerate(cells)]
        for done in as_completed(jobs):
            result = done.result()
            results[result.cell] = result
            mark = "ok" if not result.problem else "FAILED"
            print(f"{len(results):4} of {len(jobs)}  {mark:6} {result.seconds:5.1f} s  {result.cell}", flush=True)
            if result.problem:
                print("    " + result.problem.replace("\n", "\n    "), flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
        print_table(results)
        if args.markdown is not None:
            args.markdown.write_text(markdown(results))
    exits = [cell for cell in EXIT_CELLS if beside and matches(str(cell), args.k)]
    disks = [name for name in DISK_CELLS if beside and matches(f"disk, {name}", args.k)]
    failed = sum(bool(r.problem) for r in results.values())
    failed += run_exits(exits, args.jobs, args.keep) + run_disks(disks, args.jobs, args.keep)
    print(f"{len(results) + len(exits) + len(disks)} cells in {time.monotonic() - began:.0f} s, {failed} failed")
    return 1 if failed or len(results) < len(cells) + len(links) else 0


def run_link(case: LinkCase, number: int) -> Result:
    """Measures a slow link as a cell."""
    began = time.monotonic()
    found = measure(case, number)
    return Result(case, time.monotonic() - began, found.problem)


def run_exits(cells: list[ExitCell], jobs: int, keep: Path | None) -> int:
    """Runs exceptions and exits; returns how many failed."""
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run_exit_cell, cell, keep) for cell in cells]):
            result = done.result()
            failed += bool(result.problem)
            print(f"{'ok' if not result.problem else 'FAILED':6} {result.seconds:5.1f} s  {result.cell}", flush=True)
            if result.problem:
                print("    " + result.problem.replace("\n", "\n    "), flush=True)
    return failed


def run_disks(names: list[str], jobs: int, keep: Path | None) -> int:
    """Runs faults of disks and folders; returns how many failed."""
    if names and not can_mount():
        print("2 cells with disks of their own are left out: needs root, to mount them")
        names = [name for name in names if name not in NEED_MOUNTS]
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run_disk_cell, name, keep) for name in names]):
            result = done.result()
            failed += bool(result.problem)
            mark = "ok" if not result.problem else "FAILED"
            print(f"disk          {mark:6} {result.seconds:5.1f} s  {result.name}", flush=True)
            if result.problem:
                print("    " + result.problem.replace("\n", "\n    "), flush=True)
    return failed


def matches(name: str, words: str) -> bool:
    """Whether a cell's name has the words."""
    name = name.lower()
    for word in filter(None, (w.strip() for w in words.lower().split(" and "))):
        wanted = not word.startswith("not ")
        if (word.removeprefix("not ") in name) is not wanted:
            return False
    return True


def rows(results: Results) -> list[tuple[str, list[str]]]:
    """One row per task and fault, one column per rule and moment."""
    found = []
    for task, fault in TABLE:
        cells = [Cell(task, fault, rule, moment) for rule in RULES for moment in MOMENTS]
        if any(cell in results for cell in cells):
            found.append((f"{task}, {fault}", [_mark(results.get(cell)) for cell in cells]))
    return found


def _mark(result: Result | None) -> str:
    return "-" if result is None else "FAILED" if result.problem else f"{result.seconds:.0f} s"


def print_table(results: Results) -> None:
    """Prints what there is, also when the run was stopped midway."""
    width = 7
    print()
    print(" " * 22 + "".join(rule.ljust(width * len(MOMENTS)) for rule in RULES))
    print(" " * 22 + "".join(SHORT[moment].ljust(width) for _ in RULES for moment in MOMENTS))
    for name, marks in rows(results):
        print(name.ljust(22) + "".join(mark.ljust(width) for mark in marks))


def markdown(results: Results) -> str:
    """Returns the table as docs/faults.md has it: per rule the seconds at the four moments."""
    lines = [f"| task, fault | {' | '.join(RULES)} |", "| --- |" + " --- |" * len(RULES)]
    for name, marks in rows(results):
        groups = [marks[i : i + len(MOMENTS)] for i in range(0, len(marks), len(MOMENTS))]
        lines.append(
            f"| {name} | " + " | ".join(", ".join(m.removesuffix(" s") for m in group) for group in groups) + " |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
