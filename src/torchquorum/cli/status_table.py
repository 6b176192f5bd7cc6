"""The status of a run as a bar, a line and a table that fit any terminal.

Used by the live view and `torchquorum status`. What always holds: columns that do not fit are left out, the least important
first; workers that do not fit are summed up in one row; dead and slow workers are shown first. Of several optimizers each has a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar as RichBar
from rich.table import Table
from rich.text import Text

from torchquorum.cli.speeds import Speeds, of_whole_run

STYLES = {"dead": "red", "waiting": "yellow", "left": "dim"}
OTHER_LINES = 7  # lines of the screen for bar, two lines, header, summary and prompt
WAITING = 0.5  # who waits for this share of the time is shown as waiting
LEAST_ROWS = 3
LEAST_FOR = 10  # characters of the column `for`


@dataclass(frozen=True)
class Row:
    """The row of one worker."""

    name: str
    state: str
    local_step: int
    batches_per_s: float
    loss: float | None
    staleness: float
    refused: int
    waits: float | None
    waits_for: str
    inner_step: int | None = None


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, in steps or seconds, and how much time is left, as far as known."""

    label: str
    done: float
    total: float | None
    left_s: float | None
    unit: str = ""


# Header, cell, and rank: the column with the largest number is left out first.
Column = tuple[str, Callable[[Row], str], int]
_COLUMNS: tuple[Column, ...] = (
    ("worker", lambda r: r.name, 0),
    ("state", lambda r: r.state, 5),
    ("local step", lambda r: f"{r.local_step:,}", 1),
    ("batches/s", lambda r: f"{r.batches_per_s:.0f}" if r.batches_per_s >= 10 else f"{r.batches_per_s:.1f}", 2),
    ("inner step", lambda r: "" if r.inner_step is None else f"{r.inner_step:,}", 3),
    ("loss", lambda r: "" if r.loss is None else f"{r.loss:.4f}", 3),
    ("staleness", lambda r: f"{r.staleness:.2f}", 6),
    ("refused", lambda r: f"{r.refused:,}", 7),
    ("waits", lambda r: "" if r.waits is None else f"{100 * r.waits:.0f} %", 4),
    ("for", lambda r: r.waits_for, 8),
)
_LEFT = ("worker", "state", "for")
_OPTIMIZER_COLUMNS = ("optimizer", "updates", "updates/s", "loss", "rule", "staleness", "refused", "open round")
_LEFT_OF_OPTIMIZERS = ("optimizer", "rule")


def rows_of(status: Mapping[str, Any], speeds: Speeds | None = None) -> list[Row]:
    """Returns the rows of a status, with these speeds; by default with those of the whole run.

    Over some seconds a worker that waits for most of them is `waiting`, whatever it did at the moment of asking.
    """
    recent, speeds = speeds is not None, speeds or of_whole_run(status)
    rows = []
    for index, w in status["per_worker"].items():
        speed, state = speeds.workers[index], w["state"]
        if recent and speed.waits is not None and state in ("computing", "waiting"):
            state = "waiting" if speed.waits >= WAITING else "computing"
        names = wait_words(speed.waits_for) if state == "waiting" else ""
        rows.append(
            Row(
                name=f"worker {index}",
                state=state,
                local_step=w["batches"],
                batches_per_s=speed.batches_per_s,
                loss=w["loss"],
                staleness=w["staleness_mean"],
                refused=w["refused"],
                waits=speed.waits,
                waits_for=names,
                inner_step=w.get("inner_step"),
            )
        )
    return rows


def wait_words(wait: Mapping[str, Any] | None) -> str:
    """Returns in a few words for whom a worker waits."""
    if not wait:
        return ""
    missing, count = list(wait["missing"]), int(wait.get("count", len(wait["missing"])))
    names = ", ".join(str(i) for i in missing[:3]) + (f" and {count - 3} more" if count > 3 else "")
    who = f"worker {names}" if count == 1 else f"workers {names}" if count else "the ps"
    of = f"{wait['optimizer']}: " if wait.get("optimizer") else ""
    if wait["what"] == "the quorum":
        return f"{who} ({of}{wait['have']} of {wait['need']} have arrived)"
    return f"{who} ({of}{wait['have']} steps behind)"


class OptimizerTable:
    """The table of a run's optimizers, where there are several.

    Args:
        status: From ps task 0.
        rates: The updates per second of each; by default those of the whole run.
    """

    def __init__(self, status: Mapping[str, Any], rates: Mapping[str, float] | None = None) -> None:
        self.optimizers: dict[str, dict[str, Any]] = status.get("optimizers") or {}
        self._rates = rates if rates is not None else of_whole_run(status).optimizers

    @property
    def lines(self) -> int:
        """Returns how many lines it takes."""
        return len(self.optimizers) + 1 if self.optimizers else 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.optimizers:
            return
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        rows = [list(self._cells(name, of)) for name, of in self.optimizers.items()]
        shown, width = [0], max(len(row[0]) for row in rows)
        width = max(width, len(_OPTIMIZER_COLUMNS[0]))
        for k, name in enumerate(_OPTIMIZER_COLUMNS[1:], 1):
            needs = max(len(name), *(len(row[k]) for row in rows)) + 2
            if any(row[k] for row in rows) and width + needs <= options.max_width:
                shown.append(k)
                width += needs
        for k in shown:
            name = _OPTIMIZER_COLUMNS[k]
            table.add_column(
                name, justify="left" if name in _LEFT_OF_OPTIMIZERS else "right", no_wrap=True, overflow="ellipsis"
            )
        for row in rows:
            table.add_row(*(Text(row[k]) for k in shown))
        yield table

    def _cells(self, name: str, of: Mapping[str, Any]) -> Iterator[str]:
        rate = self._rates.get(name, 0.0)
        have_need = of.get("round")
        yield name
        yield f"{of['version']:,}"
        yield f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
        yield "" if of["loss"] is None else f"{of['loss']:.4f}"
        yield str(of["rule"])
        yield f"{of['staleness_mean']:.2f}"
        yield f"{of['refused']:,}"
        yield f"{have_need[0]} of {have_need[1]}" if have_need else ""


class StatusTable:
    """The table of workers, as large as the terminal allows.

    Args:
        rows: Of each worker.
        max_rows: How many are shown; by default as many as the terminal has lines for.
        other_lines: How many lines of the screen are something else's.
        hidden: Columns that are left out.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        max_rows: int | None = None,
        other_lines: int = OTHER_LINES,
        *,
        hidden: Sequence[str] = (),
    ) -> None:
        self._rows, self._max_rows, self._other_lines = list(rows), max_rows, other_lines
        self._hidden = hidden

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = self._max_rows
        if room is None and console.is_terminal:
            room = max(LEAST_ROWS, console.size.height - self._other_lines)
        shown, rest = choose(self._rows, room)
        columns = fit(shown, options.max_width, self._hidden)
        room_for = {"for": max(LEAST_FOR, options.max_width - needed(shown, columns) + LEAST_FOR)}
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for name, _, _ in columns:
            table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True, overflow="ellipsis")
        for row in shown:
            table.add_row(
                *(Text(cell(row)[: room_for.get(name)], STYLES.get(row.state, "")) for name, cell, _ in columns)
            )
        yield table
        if rest:
            yield Text(sum_up(rest), "dim", overflow="ellipsis", no_wrap=True)


def choose(rows: list[Row], room: int | None) -> tuple[list[Row], list[Row]]:
    """Returns the rows to show and those to sum up: dead workers and the slowest come first."""
    if room is None or len(rows) <= room:
        return rows, []
    order = sorted(
        range(len(rows)), key=lambda i: (rows[i].state != "dead", rows[i].state == "left", rows[i].batches_per_s)
    )
    chosen = set(order[:room])
    return [r for i, r in enumerate(rows) if i in chosen], [r for i, r in enumerate(rows) if i not in chosen]


def sum_up(rows: Sequence[Row]) -> str:
    """Returns one line about the workers that are not shown."""
    states: dict[str, int] = {}
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
    speed = sum(r.batches_per_s for r in rows)
    counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
    refused = sum(r.refused for r in rows)
    return f"and {len(rows)} faster workers: {counts}, {speed:.0f} batches/s together, {refused:,} refused"


def fit(rows: Sequence[Row], width: int, hidden: Sequence[str] = ()) -> list[Column]:
    """Returns the columns that fit into a width, without hidden ones."""
    columns = [
        c for c in _COLUMNS if c[0] not in hidden and (c[0] in ("worker", "local step") or any(c[1](r) for r in rows))
    ]
    while len(columns) > 1 and needed(rows, columns) > width:
        columns.remove(max(columns, key=lambda c: c[2]))
    return columns


def needed(rows: Sequence[Row], columns: Sequence[Column]) -> int:
    """Returns the width of columns; the column `for` may be cut short."""
    widths = [
        max([len(name), *(min(len(cell(r)), LEAST_FOR if name == "for" else 99) for r in rows)])
        for name, cell, _ in columns
    ]
    return sum(widths) + 2 * (len(widths) - 1)


class RunBar:
    """A progress bar with steps done and time left; a narrow terminal shows less of it."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        p, width = self._progress, options.max_width
        total = f" of {p.total:,.0f}" if p.total else ""
        parts = [f"{p.label} {p.done:,.0f}{total}{p.unit}"]
        if p.total:
            parts.append(f"{100 * min(1.0, p.done / p.total):.0f} %")
        if p.left_s is not None:
            parts.append(f"{clock(p.left_s)} left")
        while len(parts) > 1 and len("  ".join(parts)) + 12 > width:
            parts.pop()
        text = "  ".join(parts)
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        if p.total and console.is_terminal and width > len(text) + 10:
            grid.add_column(ratio=1)
            grid.add_row(
                text, RichBar(total=p.total, completed=min(p.done, p.total), width=None, complete_style="cyan")
            )
        else:
            grid.add_row(text)
        yield grid


def clock(seconds: float) -> str:
    """Returns a duration as 0:07, 12:30 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def headline(status: Mapping[str, Any]) -> str:
    """Returns the run in one line."""
    live, workers = len(status["live"]), status["workers"]
    rule = status["rule"] + (f" waits for {status['aggregate']}" if "aggregate" in status else "")
    if status.get("optimizers"):
        rule = f"{len(status['optimizers'])} optimizers"
    words = [rule, f"{live} of {workers} workers live"]
    words += [f"staleness {status['staleness_mean']:.2f}", f"{status['refused']:,} refused"]
    for data in (status.get("data") or {}).values():
        of = f" of {data['epochs']}" if data["epochs"] else ""
        epoch = data["epoch"] + 1 if not data["epochs"] else min(data["epoch"] + 1, data["epochs"])
        words.append(f"epoch {epoch}{of}")
    if readers := status.get("readers"):
        words.append(f"{readers['count']} readers{ages_of(readers)}")
    if away := refused_connections(status):
        words.append(away)
    return ", ".join(words)


def ages_of(readers: Mapping[str, Any]) -> str:
    """Returns how old what readers have is, as the end of a phrase: of the one that is worst off."""
    known = "age_p50_s" in readers
    return f" (age p50 {readers['age_p50_s']:.2f} s, p99 {readers['age_p99_s']:.2f} s)" if known else ""


def refused_connections(status: Mapping[str, Any]) -> str:
    """Returns how many connections a ps has refused, with the reasons; empty if none."""
    reasons = {why: n for why, n in (status.get("turned_away") or {}).items() if n}
    listed = ", ".join(f"{n:,} {why}" for why, n in sorted(reasons.items(), key=lambda item: -item[1]))
    return f"{sum(reasons.values()):,} connections refused ({listed})" if reasons else ""
