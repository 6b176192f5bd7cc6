"""The live view of a run: a bar and a row per worker in a terminal, plain lines elsewhere, nothing when quiet.

Used by `torchquorum train`, `compare`, `run --view` and `status --watch`, which poll ps task 0 and pass each status to `show`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from torchquorum.cli.status_table import (
    OTHER_LINES,
    OptimizerTable,
    RunBar,
    RunProgress,
    StatusTable,
    headline,
    rows_of,
    wait_words,
)
from torchquorum.clock import SYSTEM, Clock

PLAIN_EVERY_S = 5.0
WINDOW_S = 20.0  # the speed and the time left are averages over this time
REMEMBER_S = 3.0  # shows for whom a worker waited for this long: at the moment of asking it may be computing


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
        self._steps: deque[tuple[float, int]] = deque()
        self._versions: deque[tuple[float, dict[str, int]]] = deque()
        self._workers: dict[str, _Recent] = {}
        self._drawn: tuple[int, list[int]] = (0, [])

    def __enter__(self) -> View:
        if not self._quiet and self.console.is_terminal:
            waiting = Text("starting the tasks ...", "dim")
            # Drawn only on a new status, so that nothing is drawn between a resize and `_erase_wrapped`.
            self._live = Live(waiting, console=self.console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, text: str) -> None:
        """Prints a line above the live part."""
        if not self._quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Prints a line of the launcher, also when quiet."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

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
            self.line(plain(status))

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
        speed = self._updates_per_s()
        measured = {i: (r.batches_per_s, r.waits, r.names) for i, r in self._workers.items() if r.known}
        optimizers = OptimizerTable(status, self._optimizer_rates())
        return Group(
            RunBar(self._progress(status, speed), f"{speed:.0f} updates/s" if speed else ""),
            Text(headline(status), "dim", no_wrap=True, overflow="ellipsis"),
            optimizers,
            StatusTable(rows_of(status, measured), other_lines=OTHER_LINES + optimizers.lines),
        )

    def _note(self, status: dict[str, Any]) -> None:
        now = self._clock.now()
        self._ready_at = now if self._ready_at is None and status["per_worker"] else self._ready_at
        self._steps.append((now, status["global_step"]))
        self._versions.append((now, {name: of["version"] for name, of in (status.get("optimizers") or {}).items()}))
        while now - self._steps[0][0] > WINDOW_S:
            self._steps.popleft()
            self._versions.popleft()
        for index, worker in status["per_worker"].items():
            self._workers.setdefault(index, _Recent()).note(worker, now)

    def _updates_per_s(self) -> float:
        (then, before), (now, step) = self._steps[0], self._steps[-1]
        return max(0.0, (step - before) / (now - then)) if now - then > 0.5 else 0.0

    def _optimizer_rates(self) -> dict[str, float]:
        """Returns the updates per second of each of several optimizers, once they are known."""
        (then, before), (now, versions) = self._versions[0], self._versions[-1]
        if now - then <= 0.5:
            return {}
        return {name: max(0.0, (at - before.get(name, 0)) / (now - then)) for name, at in versions.items()}

    def _progress(self, status: dict[str, Any], speed: float) -> RunProgress:
        step, last = status["global_step"], status["last_step"]
        passed = self._clock.now() - self._ready_at if self._ready_at is not None else 0.0
        by_steps = (last - step) / speed if last and speed else None
        by_time = max(0.0, self._seconds - passed) if self._seconds is not None else None
        if last is None and self._seconds is not None:
            return RunProgress("second", min(passed, self._seconds), self._seconds, by_time)
        left = min((t for t in (by_steps, by_time) if t is not None), default=None)
        return RunProgress("global step", step, last, left)


class _Recent:
    """A worker's speed and waiting over the last second or so."""

    def __init__(self) -> None:
        self.known = False
        self.batches_per_s = self.waits = 0.0
        self.names = ""
        self._named_at = 0.0
        self._since: tuple[float, int, float] | None = None

    def note(self, worker: dict[str, Any], now: float) -> None:
        """Takes the newest status of the worker."""
        if words := wait_words(worker.get("waits_for")):
            self.names, self._named_at = words, now
        elif now - self._named_at > REMEMBER_S:
            self.names = ""
        newest = (now, worker["batches"], worker["waited_s"])
        if self._since is None:
            self._since = newest
        elif now - self._since[0] >= 1.0:
            passed = now - self._since[0]
            self.batches_per_s = max(0.0, (newest[1] - self._since[1]) / passed)
            self.waits = min(1.0, max(0.0, (newest[2] - self._since[2]) / passed))
            self._since, self.known = newest, True


def plain(status: dict[str, Any]) -> str:
    """Returns a status as one line."""
    total = f"/{status['last_step']}" if status["last_step"] else ""
    loss = "" if status["loss"] is None else f"loss {status['loss']:.4g}, "
    if optimizers := status.get("optimizers"):
        loss = "".join(f"{name} {of['version']}{_loss_of(of)}, " for name, of in optimizers.items())
    return (
        f"global step {status['global_step']}{total}, {loss}{status['batches_per_s']:.0f} batches/s, "
        f"staleness {status['staleness_mean']:.2f}, refused {status['refused']}, "
        f"live workers {len(status['live'])} of {status['workers']}"
    )


def _loss_of(optimizer: dict[str, Any]) -> str:
    return "" if optimizer["loss"] is None else f" (loss {optimizer['loss']:.4g})"
