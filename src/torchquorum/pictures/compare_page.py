"""The page and the PNG of several runs side by side: `torchquorum compare`.

What always holds: a rule has the same colour in every chart; page and PNG are made of the same scenes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchquorum.pictures import page as p
from torchquorum.pictures.charts import DASHES, HEIGHT, WIDTH, Axis, Bar, Key, Series, bar_chart, line_chart, wrap
from torchquorum.pictures.figures import Figures, figure, smooth
from torchquorum.pictures.history import History
from torchquorum.pictures.reading import read_comparison
from torchquorum.pictures.run_page import SECONDS, accuracy_axis, loss_axis
from torchquorum.pictures.scales import number
from torchquorum.pictures.scene import Area, Dot, Item, Line, Rect, Scene, Text

UPDATES = Axis(name="updates", from_zero=True)
_FAMILIES = (
    ("sync:", "c5"),
    ("sync", "c0"),
    ("async:pipeline", "c7"),
    ("async", "c1"),
    ("bounded", "c2"),
    ("buffered", "c3"),
)
_SPARE = ("c4", "c6", "c7", "c3", "c5", "c2", "c1", "c0")
CURVE_POINTS = 60
GAP = 14.0
GREY = "line"  # what was lost, in every chart; a rule's colour is what was gained


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run in a comparison: what it is called, its history and figures, its colour by role."""

    name: str
    history: History
    figures: Figures
    colour: str
    dash: tuple[float, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """Returns the accuracy at the end, or the last one measured."""
        _, _, values = self.history.measured("accuracy")
        return (
            self.history.accuracy if self.history.accuracy is not None else float(values[-1]) if len(values) else None
        )


def compared(histories: Sequence[tuple[str, History]]) -> list[Run]:
    """Gives each run its colour: that of its rule, or another where two have the same rule."""
    runs: list[Run] = []
    for name, history in histories:
        wanted = next((c for family, c in _FAMILIES if _rule_of(name, history).startswith(family)), "c4")
        taken = [r.colour for r in runs]
        colour = wanted if wanted not in taken else next((c for c in _SPARE if c not in taken), wanted)
        dash = DASHES[min(taken.count(colour), len(DASHES) - 1)]
        runs.append(Run(name=name, history=history, figures=figure(history), colour=colour, dash=dash))
    return runs


def _rule_of(name: str, history: History) -> str:
    rule = history.rule.lower().replace("()", "").replace("(aggregate=", ":").replace("(pipeline=true)", ":pipeline")
    return rule.replace("(", ":").rstrip(")") if rule != "unknown" else name


def compare_page(runs: Sequence[Run], title: str, below: str) -> str:
    """Returns the page of a comparison."""
    colours = [r.colour for r in runs]
    head = ["rule", "accuracy", "updates", "updates/s", "batches/s", "waiting", "mean staleness", "refused", "wasted"]
    missing = [f"{r.name}: {line}" for r in runs for line in r.history.missing]
    body = [
        p.heading(title, below),
        p.sentences(read_comparison(runs)),
        p.cards(charts(runs)),
        p.section("In figures"),
        p.table(head, [_row(r) for r in runs], colours),
        p.section("How it was done"),
        p.word_table([(r.name, str(r.history.folder)) for r in runs]),
        '<p class="dim">Each run has its own page: <code>torchquorum report FOLDER</code>. Wasted batches are those that '
        "became part of no update. Staleness is over the gradients that were used.</p>",
    ]
    if missing:
        body += [p.section("What is missing here"), p.sentences(missing)]
    return p.page(f"{title}: torchquorum", body)


def _row(run: Run) -> list[str]:
    f = run.figures
    return [
        run.name,
        f"{100 * run.accuracy:.2f} %" if run.accuracy is not None else "-",
        number(f.updates),
        number(f.updates_per_s),
        number(f.batches_per_s),
        f"{100 * f.waiting_share:.0f} %",
        f"{f.staleness_mean:.2f}",
        number(sum(c for r, c in f.refused.items() if r != "past last step")),
        f"{100 * f.wasted / f.batches:.1f} %" if f.batches else "-",
    ]


def charts(runs: Sequence[Run]) -> list[Scene]:
    """Returns the charts of a comparison."""
    accuracy = accuracy_axis([float(v) for r in runs for v in r.history.measured("accuracy")[2]])
    losses = np.concatenate([r.history.loss for r in runs]) if runs else np.array([])
    loss = loss_axis(losses)
    none = "no accuracy measured: use tq.EvaluateHook or session.measure(accuracy=...)"
    no_loss = "no loss recorded: call optimizer.step(loss=loss)"
    return [
        line_chart("Accuracy by the clock", [_accuracy(r, by_time=True) for r in runs], SECONDS, accuracy, empty=none),
        line_chart("Loss by the clock", [_loss(r, by_time=True) for r in runs], SECONDS, loss, empty=no_loss),
        _speed(runs),
        line_chart("Accuracy by updates", [_accuracy(r, by_time=False) for r in runs], UPDATES, accuracy, empty=none),
        line_chart("Loss by updates", [_loss(r, by_time=False) for r in runs], UPDATES, loss, empty=no_loss),
        _fate(runs),
        _time(runs),
        _staleness(runs),
        _updates(runs),
    ]


def _accuracy(run: Run, *, by_time: bool) -> Series:
    steps, clock, values = run.history.measured("accuracy")
    at = clock if by_time else steps
    dots = len(values) < 25
    x, y = [float(v) for v in at], [float(v) for v in values]
    return Series(name=run.name, x=x, y=y, colour=run.colour, dash=run.dash, dots=dots)


def _loss(run: Run, *, by_time: bool) -> Series:
    kept = run.history.kept
    at = run.history.clock if by_time else run.history.met
    curve = smooth(at[kept], run.history.loss[kept], CURVE_POINTS)
    return Series(name=run.name, x=curve.x, y=curve.y, colour=run.colour, dash=run.dash)


def _speed(runs: Sequence[Run]) -> Scene:
    bars = [
        Bar(name=r.name, parts=[(r.figures.batches_per_s, r.colour, "")], note=number(r.figures.batches_per_s))
        for r in runs
    ]
    return bar_chart("Batches per second, all workers", bars, Axis(name="batches per second"), height=HEIGHT)


def _updates(runs: Sequence[Run]) -> Scene:
    bars = [
        Bar(name=r.name, parts=[(r.figures.updates_per_s, r.colour, "")], note=number(r.figures.updates_per_s))
        for r in runs
    ]
    return bar_chart("Updates per second", bars, Axis(name="updates per second"))


def _fate(runs: Sequence[Run]) -> Scene:
    bars = []
    for r in runs:
        share = 100 * r.figures.wasted / r.figures.batches if r.figures.batches else 0.0
        parts = [(r.figures.used, r.colour, "used"), (r.figures.wasted, GREY, "wasted")]
        bars.append(Bar(name=r.name, parts=parts, note=f"{share:.0f} % wasted"))
    keys = [Key(name="refused and wasted; the rest became updates", colour=GREY)]
    return bar_chart("What became of the batches", bars, Axis(name="batches"), keys=keys, height=HEIGHT)


def _time(runs: Sequence[Run]) -> Scene:
    bars = []
    for r in runs:
        busy = 100 * (1 - r.figures.waiting_share)
        parts = [(busy, r.colour, "computing"), (100 - busy, GREY, "waiting")]
        bars.append(Bar(name=r.name, parts=parts if r.figures.workers else [], note=f"waited {100 - busy:.0f} %"))
    keys = [Key(name="waiting; the rest is computing and sending", colour=GREY)]
    return bar_chart("How workers spent their time", bars, Axis(name="share of all workers' time", unit="%"), keys=keys)


def _staleness(runs: Sequence[Run]) -> Scene:
    bars = []
    for r in runs:
        note = f"{r.figures.staleness_mean:.2f}, at most {r.figures.staleness_max}"
        bars.append(Bar(name=r.name, parts=[(r.figures.staleness_mean, r.colour, "")], note=note))
    axis = Axis(name="mean staleness of used gradients", unit="versions")
    return bar_chart("Staleness", bars, axis, empty="no gradient was stale")


def compare_picture(runs: Sequence[Run], title: str, below: str, *, columns: int = 3) -> Scene:
    """Returns all charts of a comparison as one scene, for the PNG."""
    scenes = charts(runs)
    width = columns * WIDTH + (columns + 1) * GAP
    scene = Scene(width, 0.0, title)
    scene.add(Text(GAP + 2, 34, title, 20, bold=True), Text(GAP + 2, 55, below, 12.5, colour="dim"))
    y = 70.0
    for sentence in read_comparison(runs):
        for i, line in enumerate(wrap(sentence, width - 60, 13)):
            scene.add(Text(GAP + 16, y + 8, line, 13))
            if i == 0:
                scene.add(Dot(GAP + 6, y + 4, 2, "ink"))
            y += 19
    y += 6
    for start in range(0, len(scenes), columns):
        row = scenes[start : start + columns]
        height = max(s.height for s in row)
        for i, chart in enumerate(row):
            x = GAP + i * (WIDTH + GAP)
            scene.add(Rect(x, y, WIDTH, height, "surface"))
            scene.add(Line([(x, y), (x + WIDTH, y), (x + WIDTH, y + height), (x, y + height), (x, y)], "grid"))
            scene.add(*(moved(item, x, y) for item in chart.items))
        y += height + GAP
    scene.height = y
    return scene


def moved(item: Item, x: float, y: float) -> Item:
    """Returns an item at another place."""
    if isinstance(item, Line | Area):
        return replace(item, points=[(px + x, py + y) for px, py in item.points])
    return replace(item, x=item.x + x, y=item.y + y)


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns the figures of a comparison for programs."""
    found = []
    for r in runs:
        f = r.figures
        losses = r.history.loss[r.history.kept & np.isfinite(r.history.loss)]
        tail = losses[-max(1, len(losses) // 20) :]
        found.append(
            {
                "name": r.name,
                "rule": r.history.rule,
                "folder": str(r.history.folder),
                "accuracy": r.accuracy,
                "final_loss": round(float(tail.mean()), 5) if len(tail) and math.isfinite(float(tail.mean())) else None,
                "seconds": round(f.seconds, 3),
                "updates": f.updates,
                "updates_per_s": round(f.updates_per_s, 2),
                "batches": f.batches,
                "batches_per_s": round(f.batches_per_s, 2),
                "staleness_mean": round(f.staleness_mean, 4),
                "staleness_max": f.staleness_max,
                "refused": {reason: count for reason, count in f.refused.items() if reason != "past last step"},
                "wasted": f.wasted,
                "waiting_share": round(f.waiting_share, 4),
            }
        )
    return found
