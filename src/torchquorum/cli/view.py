"""The live view of a run: a bar and a row per worker in a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

PLAIN_EVERY_S = 5.0


def _number(value: Any, form: str = "g") -> str:
    return "" if value is None else format(value, form)


class View:
    """Shows the status of a run while it changes."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.console, self._quiet = console, quiet
        self._live: Live | None = None
        self._rates: dict[str, tuple[float, int, float]] = {}
        self._shown_at = time.monotonic()
        self._progress = Progress(
            TextColumn("global step"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._bar = self._progress.add_task("steps", total=None)

    def __enter__(self) -> View:
        if not self._quiet and self.console.is_terminal:
            self._live = Live(
                Group("starting the tasks ..."), console=self.console, refresh_per_second=8, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """Prints a line above the live part."""
        if not self._quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Prints a line of the launcher's own, also when quiet."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, status: dict[str, Any]) -> None:
        """Shows the newest status."""
        if self._quiet or not status.get("ready") or "per_worker" not in status:
            return
        if self._live is not None:
            self._live.update(self._render(status))
        elif time.monotonic() - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = time.monotonic()
            self.line(self._plain(status))

    def _render(self, status: dict[str, Any]) -> RenderableType:
        self._progress.update(self._bar, completed=status["global_step"], total=status["last_step"])
        return Group(self._progress, worker_table(status, self._rate))

    def _plain(self, status: dict[str, Any]) -> str:
        total = f"/{status['last_step']}" if status["last_step"] else ""
        return (
            f"global step {status['global_step']}{total}, loss {_number(status['loss'], '.4g')}, "
            f"{status['batches_per_s']:.0f} batches/s, staleness {status['staleness_mean']:.2f}, "
            f"refused {status['refused']}, live workers {len(status['live'])} of {status['workers']}"
        )

    def _rate(self, index: str, batches: int) -> float:
        """The worker's speed over the last second or so."""
        now = time.monotonic()
        at, count, rate = self._rates.get(index, (now, batches, 0.0))
        if now - at >= 1.0:
            rate = (batches - count) / (now - at)
            at, count = now, batches
        self._rates[index] = (at, count, rate)
        return rate


def worker_table(status: dict[str, Any], rate: Any = None) -> Table:
    """Returns a table with a row per worker."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("worker", "state", "local step", "batches/s", "loss", "staleness", "refused", "waited"):
        table.add_column(name, justify="left" if name in ("worker", "state") else "right", no_wrap=True)
    for index, worker in status["per_worker"].items():
        speed = rate(index, worker["batches"]) if rate is not None else worker["batches_per_s"]
        table.add_row(
            f"worker {index}",
            worker["state"],
            str(worker["batches"]),
            f"{speed or worker['batches_per_s']:.0f}",
            _number(worker["loss"], ".4f"),
            f"{worker['staleness_mean']:.2f}",
            str(worker["refused"]),
            f"{worker['waited_s']:.1f} s",
        )
    return table
