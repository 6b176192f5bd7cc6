"""The page, the PNG and the JSON of several runs side by side.

Called by `torchquorum compare`. What always holds: a run has the same colour in every chart; page and PNG show the same scenes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchquorum.report import html_page as p
from torchquorum.report.charts import HEIGHT, Axis, ChartBar, LegendEntry, Series, bar_chart, line_chart
from torchquorum.report.comparison import ComparedRun, describe_comparison
from torchquorum.report.figures import smooth
from torchquorum.report.picture import picture
from torchquorum.report.run_page import SECONDS, accuracy_axis, loss_axis
from torchquorum.report.scales import number
from torchquorum.report.scene import Scene

UPDATES = Axis(name="updates", from_zero=True)
CURVE_POINTS = 60
GREY = "line"  # waste and waiting, in every chart; a run's colour stands for useful work


def compare_page(runs: Sequence[ComparedRun], title: str, below: str) -> str:
    """Returns the page of a comparison."""
    colours = [r.colour for r in runs]
    head = [
        "rule",
        "final accuracy",
        "updates",
        "updates/s",
        "batches/s",
        "waiting",
        "mean staleness",
        "refused",
        "wasted",
    ]
    missing = [f"{r.name}: {line}" for r in runs for line in r.history.missing]
    body = [
        p.heading(title, below),
        p.sentences(describe_comparison(runs)),
        p.cards(charts(runs)),
        p.section("In figures"),
        p.table(head, [_row(r) for r in runs], colours),
        p.section("Folders"),
        p.word_table([(r.name, str(r.history.folder)) for r in runs]),
        '<p class="dim">Each run has its own page: <code>torchquorum report FOLDER</code>. A wasted batch is one that '
        "became part of no update. Staleness is that of the used gradients.</p>",
    ]
    if missing:
        body += [p.section("Missing"), p.sentences(missing)]
    return p.page(f"{title}: torchquorum", body)


def _row(run: ComparedRun) -> list[str]:
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


def charts(runs: Sequence[ComparedRun]) -> list[Scene]:
    """Returns the charts of a comparison."""
    accuracy = accuracy_axis([float(v) for r in runs for v in r.history.measured("accuracy")[2]])
    losses = np.concatenate([r.history.loss for r in runs]) if runs else np.array([])
    loss = loss_axis(losses)
    none = "no accuracy measured: use tq.EvaluateHook or session.measure(accuracy=...)"
    no_loss = "no loss recorded: call optimizer.step(loss=loss)"
    return [
        line_chart(
            "Validation accuracy by the clock",
            [_accuracy(r, by_time=True) for r in runs],
            SECONDS,
            accuracy,
            empty=none,
        ),
        line_chart("Loss by the clock", [_loss(r, by_time=True) for r in runs], SECONDS, loss, empty=no_loss),
        _speed(runs),
        line_chart(
            "Validation accuracy by updates", [_accuracy(r, by_time=False) for r in runs], UPDATES, accuracy, empty=none
        ),
        line_chart("Loss by updates", [_loss(r, by_time=False) for r in runs], UPDATES, loss, empty=no_loss),
        _fate(runs),
        _time(runs),
        _staleness(runs),
        _updates(runs),
    ]


def _accuracy(run: ComparedRun, *, by_time: bool) -> Series:
    steps, clock, values = run.history.measured("accuracy")
    at = clock if by_time else steps
    dots = len(values) < 25
    x, y = [float(v) for v in at], [float(v) for v in values]
    return Series(name=run.name, x=x, y=y, colour=run.colour, dash=run.dash, dots=dots)


def _loss(run: ComparedRun, *, by_time: bool) -> Series:
    kept = run.history.kept
    at = run.history.clock if by_time else run.history.met
    curve = smooth(at[kept], run.history.loss[kept], CURVE_POINTS)
    return Series(name=run.name, x=curve.x, y=curve.y, colour=run.colour, dash=run.dash)


def _speed(runs: Sequence[ComparedRun]) -> Scene:
    bars = [
        ChartBar(name=r.name, parts=[(r.figures.batches_per_s, r.colour, "")], note=number(r.figures.batches_per_s))
        for r in runs
    ]
    return bar_chart("Batches per second, all workers", bars, Axis(name="batches per second"), height=HEIGHT)


def _updates(runs: Sequence[ComparedRun]) -> Scene:
    bars = [
        ChartBar(name=r.name, parts=[(r.figures.updates_per_s, r.colour, "")], note=number(r.figures.updates_per_s))
        for r in runs
    ]
    return bar_chart("Updates per second", bars, Axis(name="updates per second"))


def _fate(runs: Sequence[ComparedRun]) -> Scene:
    bars = []
    for r in runs:
        share = 100 * r.figures.wasted / r.figures.batches if r.figures.batches else 0.0
        parts = [(r.figures.used, r.colour, "used"), (r.figures.wasted, GREY, "wasted")]
        bars.append(ChartBar(name=r.name, parts=parts, note=f"{share:.0f} % wasted"))
    keys = [LegendEntry(name="refused and wasted; the rest became updates", colour=GREY)]
    return bar_chart("What became of the batches", bars, Axis(name="batches"), keys=keys, height=HEIGHT)


def _time(runs: Sequence[ComparedRun]) -> Scene:
    bars = []
    for r in runs:
        busy = 100 * (1 - r.figures.waiting_share)
        parts = [(busy, r.colour, "computing"), (100 - busy, GREY, "waiting")]
        bars.append(ChartBar(name=r.name, parts=parts if r.figures.workers else [], note=f"waited {100 - busy:.0f} %"))
    keys = [LegendEntry(name="waiting; the rest is computing and sending", colour=GREY)]
    return bar_chart("How workers spent their time", bars, Axis(name="share of all workers' time", unit="%"), keys=keys)


def _staleness(runs: Sequence[ComparedRun]) -> Scene:
    bars = []
    for r in runs:
        note = f"{r.figures.staleness_mean:.2f}, at most {r.figures.staleness_max}"
        bars.append(ChartBar(name=r.name, parts=[(r.figures.staleness_mean, r.colour, "")], note=note))
    axis = Axis(name="mean staleness of used gradients", unit="versions")
    return bar_chart("Staleness", bars, axis, empty="no gradient was stale")


def compare_picture(runs: Sequence[ComparedRun], title: str, below: str) -> Scene:
    """Returns all charts of a comparison as one scene, for the PNG."""
    return picture(charts(runs), title, below, describe_comparison(runs))


def as_json(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Returns the figures of a comparison as data."""
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
