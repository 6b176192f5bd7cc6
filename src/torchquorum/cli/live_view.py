"""The live view of a run: a bar and a row per worker in a terminal, plain lines elsewhere, nothing when quiet.

Used by `torchquorum train`, `compare`, `run --view` and `status --watch`, which poll ps task 0 and pass each status to `show`.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from torchquorum.cli.speeds import RecentSpeeds, Speeds, of_whole_run
from torchquorum.cli.status_table import (
    OTHER_LINES,
    OptimizerTable,
    RunBar,
    RunProgress,
    StatusTable,
    clock,
    headline,
    rows_of,
)
from torchquorum.clock import SYSTEM, Clock

PLAIN_EVERY_S = 5.0


class View:
    """Shows the status of a run while it changes.

    Args:
        console: The terminal or file.
        quiet: Show nothing but notes.
        seconds: The run's limit in seconds, if it has one.
        plain_every_s: Seconds between two lines where there is no terminal.
        clock: Tells the time.
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        seconds: float | None = None,
        plain_every_s: float = PLAIN_EVERY_S,
        clock: Clock = SYSTEM,
    ) -> None:
        self.console, self._quiet, self._seconds = console, quiet, seconds
        self._plain_every_s, self._clock = plain_every_s, clock
        self._live: Live | None = None
        self._shown_at = clock.now()
        self._ready_at: float | None = None
        self._recent = RecentSpeeds()
        self._began_at = clock.now()
        self._drawn: tuple[int, list[int]] = (0, [])

    def __enter__(self) -> View:
        if not self._quiet and self.console.is_terminal:
            self._began_at = self._clock.now()
            # Drawn only on a new status, so that nothing is drawn between a resize and `_erase_wrapped`.
            self._live = Live(self._starting(), console=self.console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _starting(self) -> Text:
        return Text(f"starting the tasks ... {clock(self._clock.now() - self._began_at)}", "dim")

    def wait(self) -> None:
        """There is no status yet: shows for how long the tasks have been starting."""
        if self._live is not None and self._ready_at is None:
            self._live.update(self._starting(), refresh=True)

    def line(self, text: str) -> None:
        """Prints a line above the live part."""
        if not self._quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Prints a line of the launcher, also when quiet; a terminal wraps it between words."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    def show(self, status: dict[str, Any]) -> None:
        """Shows the newest status."""
        if self._quiet or not status.get("ready") or "per_worker" not in status:
            return
        self._note(status)
        if self._live is not None:
            self._erase_wrapped()
            shown = self.render(status)
            self._live.update(shown, refresh=True)
            lines = self.console.render_lines(shown, pad=False)
            self._drawn = self.console.width, [sum(part.cell_length for part in line) for line in lines]
        elif self._clock.now() - self._shown_at >= self._plain_every_s:
            self._shown_at = self._clock.now()
            self.line(plain(status, self._speeds(status)))

    def _erase_wrapped(self) -> None:
        """Erases the lines that were wrapped when the window became narrower: they take more rows than were drawn."""
        before, widths = self._drawn
        now = max(1, self.console.width)
        if now < before:
            more = sum(max(0, (width - 1) // now) for width in widths)
            self.console.control(Control(*((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)) * more))
        self._drawn = now, []

    def render(self, status: dict[str, Any]) -> RenderableType:
        """Returns the live part."""
        speeds = self._speeds(status)
        optimizers = OptimizerTable(status, speeds.optimizers)
        return Group(
            RunBar(self._progress(status)),
            Text(str(speeds), "dim", no_wrap=True, overflow="ellipsis"),
            Text(headline(status), "dim", no_wrap=True, overflow="ellipsis"),
            optimizers,
            StatusTable(rows_of(status, speeds), other_lines=OTHER_LINES + optimizers.lines),
        )

    def _note(self, status: dict[str, Any]) -> None:
        now = self._clock.now()
        self._ready_at = now if self._ready_at is None and status["per_worker"] else self._ready_at
        self._recent.note(status, now)

    def _speeds(self, status: dict[str, Any]) -> Speeds:
        return self._recent.speeds() or of_whole_run(status)

    def _progress(self, status: dict[str, Any]) -> RunProgress:
        speed = self._recent.steps_per_s
        step, last = status["global_step"], status["last_step"]
        passed = self._clock.now() - self._ready_at if self._ready_at is not None else 0.0
        by_steps = (last - step) / speed if last and speed else None
        by_time = max(0.0, self._seconds - passed) if self._seconds is not None else None
        if last is None and self._seconds is not None:
            return RunProgress("second", min(passed, self._seconds), self._seconds, by_time)
        left = min((t for t in (by_steps, by_time) if t is not None), default=None)
        return RunProgress("global step", step, last, left)


def plain(status: dict[str, Any], speeds: Speeds) -> str:
    """Returns a status as one line."""
    total = f"/{status['last_step']}" if status["last_step"] else ""
    loss = "" if status["loss"] is None else f"loss {status['loss']:.4g}, "
    if optimizers := status.get("optimizers"):
        loss = "".join(f"{name} {of['version']}{_loss_of(of)}, " for name, of in optimizers.items())
    return (
        f"global step {status['global_step']}{total}, {loss}{speeds}, "
        f"staleness {status['staleness_mean']:.2f}, refused {status['refused']}, "
        f"live workers {len(status['live'])} of {status['workers']}"
    )


def _loss_of(optimizer: dict[str, Any]) -> str:
    return "" if optimizer["loss"] is None else f" (loss {optimizer['loss']:.4g})"
