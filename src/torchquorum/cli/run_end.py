"""How `torchquorum train` and `run` end: the result with a row per worker, or the root cause, and where the run stands.

What always holds: the last line says whether the run can go on from where it is; the figures are averages over the whole run, and the
table says so.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from torchquorum.cli.status_table import StatusTable, rows_of
from torchquorum.formats.scratch import scratch_folder
from torchquorum.launcher.launched import LaunchedCluster
from torchquorum.launcher.outcome import INTERRUPTED

MOST_ROWS = 16  # of the table of workers, where the output is no terminal


class RunReport:
    """The report that ps task 0 writes at the end of a run.

    Args:
        path: Where it writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = self._stamp()

    def read(self) -> dict[str, Any] | None:
        """Returns it, or None if this run has written none."""
        return json.loads(self.path.read_text()) if self._stamp() not in (None, self._before) else None

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino


@contextmanager
def report_of_run(asked: str | None) -> Iterator[RunReport]:
    """Gives the run a file for its report: the one that was asked for, or one that goes away with the block."""
    with scratch_folder() as folder:
        yield RunReport(Path(asked).absolute() if asked else folder / "report.json")


def show_end(
    console: Console,
    code: int,
    report: dict[str, Any] | None,
    cluster: LaunchedCluster,
    *,
    folder: str | None = None,
    again: str = "the same command goes on",
) -> None:
    """Shows how a run has ended.

    Args:
        console: Where to.
        code: The exit code of the run.
        report: What ps task 0 has reported.
        cluster: The tasks, of which some may have failed.
        folder: The run's folder, as the user wrote it; by default as the report has it.
        again: How to go on with a run that was stopped.
    """
    if report is not None and report.get("batches"):
        _show_figures(console, report)
    home = folder or (report or {}).get("logdir")
    if report is not None and home:
        named = shlex.quote(_short(home))
        console.print(f"run folder    {named}", soft_wrap=True, markup=False)
        console.print(f"charts        {program()} report {named}", soft_wrap=True, markup=False)
    if code not in (0, INTERRUPTED) and (cause := cluster.root_cause):
        console.print(Text(f"torchquorum: the run failed: {cause}", "bold"), soft_wrap=not console.is_terminal)
    if code != 0:
        where = where_it_stopped(report, again if code == INTERRUPTED else "")
        console.print(f"torchquorum: {where}", soft_wrap=not console.is_terminal, markup=False)


def where_it_stopped(report: dict[str, Any] | None, again: str) -> str:
    """Returns at which step a run has stopped before its end, whether that is saved, and how to go on."""
    if report is None or "global_step" not in report:
        return "stopped before the run began: nothing was trained, and nothing is lost"
    step, last = report["global_step"], report.get("last_step")
    of = f" of {last:,}" if last else ""
    saved = report.get("saved_step") if report.get("logdir") else None
    if saved is not None and saved == step:
        return f"stopped at step {step:,}{of}, saved{f'; {again}' if again else ''}"
    why = report.get("not_saved") or ("" if report.get("logdir") else "the run has no folder; give it a logdir")
    kept = f"; the last checkpoint is of step {saved:,}" if saved else ""
    return f"stopped at step {step:,}{of}, not saved{f': {why}' if why else ''}{kept}"


def _show_figures(console: Console, report: dict[str, Any]) -> None:
    if report.get("accuracy") is not None:
        console.print(f"test accuracy {100 * report['accuracy']:.2f} %", style="bold")
    console.print(
        f"{report['updates']:,} updates from {report['batches']:,} batches in {report['seconds']:.1f} s "
        f"({report['batches_per_s']:.0f} batches/s), {report['refused']:,} gradients refused, "
        f"staleness {report['staleness_mean']:.2f} on average, {report['staleness_max']} at most",
        soft_wrap=True,
    )
    if report.get("min_workers"):
        there = sum(w["batches"] > 0 for w in report["per_worker"].values())
        console.print(f"{there} workers took part, of at most {report['workers']}")
    for data in (report.get("data") or {}).values():
        again = f", {data['again']:,} assigned again" if data["again"] else ""
        epochs = (
            f"{data['used']:,} of {data['of']:,} batches of {data['epochs']} epochs"
            if data["of"]
            else f"{data['used']:,} batches"
        )
        console.print(f"{epochs} are part of the variables{again}")
    rows = [row for row in rows_of(report) if row.local_step]
    if rows:
        room = None if console.is_terminal else MOST_ROWS
        console.print(StatusTable(rows, max_rows=room, hidden=("state", "loss", "for")))


def program() -> str:
    """Returns how to call torchquorum from here: by its name if the shell finds it, else by its path."""
    called = Path(sys.argv[0])
    if shutil.which("torchquorum") or called.name != "torchquorum":
        return "torchquorum"
    return os.path.relpath(called)


def typed_command() -> str:
    """Returns the command line as it was typed."""
    return shlex.join(["torchquorum", *sys.argv[1:]])


def _short(folder: str) -> str:
    """Returns a folder as seen from here, where that is shorter."""
    if "://" in folder:
        return folder
    seen = os.path.relpath(folder)
    return folder if seen.startswith("..") else seen
