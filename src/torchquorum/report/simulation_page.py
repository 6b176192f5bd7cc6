"""The page, the PNG and the JSON of simulated rules.

Called by `torchquorum simulate`. What always holds: a rule has the same colour in every chart; page and PNG show the same scenes; a
sentence comes from the figures alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchquorum.report import html_page as p
from torchquorum.report.charts import HEIGHT, Axis, ChartBar, LegendEntry, Series, bar_chart, line_chart
from torchquorum.report.comparison import pick_colour
from torchquorum.report.picture import picture
from torchquorum.report.scales import number
from torchquorum.report.scene import Scene
from torchquorum.simulation.recorded_run import RecordedRun
from torchquorum.simulation.sweep import SimulatedRule, best_of, estimate_by_arrivals

GREY = "line"
SECONDS = Axis(name="virtual time", unit="s", from_zero=True)
_CAUSES = {
    "the quorum": "c4",
    "the slowest worker": "c3",
    "the answer to the push before": "c6",
}
_POINTS = 120
_MOST_LINES = 8


@dataclass(frozen=True, kw_only=True)
class SimulatedSweep:
    """What was simulated: the rules, the scenario in words, and the run that the times come from, if they do."""

    runs: Sequence[SimulatedRule]
    below: str
    recorded: RecordedRun | None = None

    @property
    def title(self) -> str:
        """Returns the title of the page."""
        names = ", ".join(r.name for r in self.runs)
        return f"Simulated: {names}" if len(names) < 60 else f"Simulated: {len(self.runs)} rules"

    @property
    def colours(self) -> list[str]:
        """Returns a colour for each rule."""
        found: list[str] = []
        for r in self.runs:
            found.append(pick_colour(r.name, found))
        return found


def describe_sweep(sweep: SimulatedSweep) -> list[str]:
    """Returns the findings, in sentences."""
    lines = []
    if sweep.recorded is not None:
        lines += _against_the_run(sweep, sweep.recorded)
    for r in sweep.runs if len(sweep.runs) <= 4 else []:
        f = r.figures
        waits = ", ".join(f"{100 * share:.0f} % for {cause}" for cause, share in f.waiting.items() if share >= 0.005)
        said = f"{r.name}: {number(f.updates_per_s)} updates/s of {f.aggregate_mean:.3g} gradients"
        said += f"; workers wait {waits} of their time" if waits else "; no worker waits"
        if f.refused:
            said += f"; {100 * sum(f.refused.values()) / f.gradients:.1f} % of the gradients are refused"
        lines.append(said + ".")
    if len(sweep.runs) > 1:
        lines += _best(sweep.runs)
    return lines


def _against_the_run(sweep: SimulatedSweep, recorded: RecordedRun) -> list[str]:
    same = [r for r in sweep.runs if r.figures.rule == str(recorded.rule) and r.figures.workers == recorded.workers]
    if not same:
        return [
            f"The run that the times come from made {number(recorded.updates_per_s)} updates/s with {recorded.rule}."
        ]
    off = 100 * (same[0].figures.updates_per_s / recorded.updates_per_s - 1)
    return [
        f"The run made {number(recorded.updates_per_s)} updates/s with {recorded.rule}; the simulation of the same makes "
        f"{number(same[0].figures.updates_per_s)}, {off:+.1f} %."
    ]


def _best(runs: Sequence[SimulatedRule]) -> list[str]:
    """The rule with the most progress, and the best number of backup workers where several were tried."""
    rounds = [r for r in runs if r.aggregate is not None]
    noise = runs[0].counts.scenario.noise
    by = (
        "gradients used per second"
        if noise is None
        else f"progress per second with a noise scale of {noise:g} gradients"
    )
    lines = []
    if len(rounds) > 1:
        best = best_of(rounds)
        spare = best.figures.workers - (best.aggregate or 0)
        lines.append(
            f"The best number to wait for is {best.aggregate} of {best.figures.workers}, {spare} backup workers: the most {by}."
        )
    if len(rounds) < len(runs):
        lines.append(f"{best_of(runs).name} has the most {by}; what staleness costs is not part of it.")
    return lines


def simulation_charts(sweep: SimulatedSweep) -> list[Scene]:
    """Returns the charts of simulated rules."""
    runs, colours = sweep.runs, sweep.colours
    examples = runs[0].counts.scenario.batch_size > 1
    what = "Examples used per second" if examples else "Gradients used per second"
    scenes = [
        _bars("Updates per second", [(r.figures.updates_per_s) for r in runs], sweep, "updates per second"),
        _bars(what, [r.figures.examples_per_s for r in runs], sweep, what.lower()),
        _time(runs),
        _fate(sweep),
        _bars("Staleness", [r.figures.staleness_mean for r in runs], sweep, "mean staleness in versions"),
        line_chart(
            "Updates over time",
            [_course(r, colour) for r, colour in list(zip(runs, colours, strict=True))[:_MOST_LINES]],
            SECONDS,
            Axis(name="updates", from_zero=True),
        ),
    ]
    return [*scenes, *_backup(runs), *_chosen(runs)]


def _bars(title: str, values: Sequence[float], sweep: SimulatedSweep, axis: str) -> Scene:
    bars = [
        ChartBar(name=r.name, parts=[(value, colour, "")], note=number(value))
        for r, value, colour in zip(sweep.runs, values, sweep.colours, strict=True)
    ]
    return bar_chart(title, bars, Axis(name=axis), height=HEIGHT, empty="none, under every rule")


def _time(runs: Sequence[SimulatedRule]) -> Scene:
    bars, causes = [], dict[str, str]()
    for r in runs:
        f = r.figures
        parts = [(100 * f.computing, "c2", "computing"), (100 * f.sending, "c5", "sending")]
        for cause, share in f.waiting.items():
            causes[cause] = _CAUSES[cause]
            parts.append((100 * share, _CAUSES[cause], f"waiting for {cause}"))
        bars.append(ChartBar(name=r.name, parts=parts, note=f"waits {100 * sum(f.waiting.values()):.0f} %"))
    keys = [LegendEntry(name="computing", colour="c2")]
    keys += [LegendEntry(name="sending", colour="c5")] if any(r.figures.sending for r in runs) else []
    keys += [LegendEntry(name=f"waiting for {cause}", colour=colour) for cause, colour in causes.items()]
    axis = Axis(name="share of the workers' time", unit="%")
    return bar_chart("How workers spend their time", bars, axis, keys=keys, height=HEIGHT)


def _fate(sweep: SimulatedSweep) -> Scene:
    bars = []
    for r, colour in zip(sweep.runs, sweep.colours, strict=True):
        f = r.figures
        total = f.gradients or 1
        parts = [(100 * f.used / total, colour, "used")]
        parts += [(100 * count / total, GREY, f"refused: {why}") for why, count in f.refused.items()]
        bars.append(ChartBar(name=r.name, parts=parts, note=f"{100 * (1 - f.used / total):.1f} % unused"))
    keys = [LegendEntry(name="refused; the rest becomes updates", colour=GREY)]
    return bar_chart("What becomes of the gradients", bars, Axis(name="gradients", unit="%"), keys=keys, height=HEIGHT)


def _course(run: SimulatedRule, colour: str) -> Series:
    times = run.counts.update_times
    step = max(1, len(times) // _POINTS)
    picked = range(step - 1, len(times), step)
    return Series(
        name=run.name, x=[0.0, *(times[i] for i in picked)], y=[0.0, *(i + 1.0 for i in picked)], colour=colour
    )


def _backup(runs: Sequence[SimulatedRule]) -> list[Scene]:
    """By the number waited for: the time to the same loss, and when the k-th gradient of a round arrives."""
    rounds = sorted(((r.aggregate, r) for r in runs if r.aggregate is not None), key=lambda kr: kr[0])
    if len(rounds) < 2:
        return []
    costs = [1 / r.figures.progress_per_s if r.figures.progress_per_s else float("nan") for _, r in rounds]
    least = min(costs)
    numbers = [float(k) for k, _ in rounds]
    series = [Series(name="simulated", x=numbers, y=[c / least for c in costs], colour="c0", dots=True)]
    widest = rounds[-1][1]
    estimate = estimate_by_arrivals(widest)
    if rounds[-1][0] == widest.figures.workers:
        shown = [(k, estimate[int(k) - 1] / least) for k in numbers if k <= len(estimate)]
        series.append(Series(name="k-th arrival", x=[k for k, _ in shown], y=[v for _, v in shown], colour="c1"))
    of = Axis(name="gradients waited for")
    arrivals = widest.figures.arrivals_s
    return [
        line_chart("Time to the same loss", series, of, Axis(name="best simulated = 1")),
        line_chart(
            f"When the k-th gradient arrives, {widest.name}",
            [Series(name="", x=[k + 1.0 for k in range(len(arrivals))], y=arrivals, colour="c1")],
            Axis(name="k"),
            Axis(name="since the round began", unit="s", from_zero=True),
        ),
    ]


def _chosen(runs: Sequence[SimulatedRule]) -> list[Scene]:
    series = []
    for r in (r for r in runs if r.figures.chosen):
        x, y = [0.0], [float(r.figures.workers)]
        for at, _, chosen in r.figures.chosen:
            x, y = [*x, at, at], [*y, y[-1], float(chosen)]
        series.append(Series(name=r.name, x=[*x, r.figures.seconds], y=[*y, y[-1]], colour="c5"))
    axis = Axis(name="gradients per update", from_zero=True)
    return [line_chart("Gradients waited for", series, SECONDS, axis)] if series else []


def simulation_page(sweep: SimulatedSweep) -> str:
    """Returns the page of simulated rules."""
    head = [
        "rule",
        "updates/s",
        "gradients per update",
        "used per s",
        "waiting",
        "mean staleness",
        "refused",
        "failures",
    ]
    body = [
        p.heading(sweep.title, sweep.below),
        p.sentences(describe_sweep(sweep)),
        p.cards(simulation_charts(sweep)),
        p.section("In figures"),
        p.table(head, [_row(r) for r in sweep.runs], sweep.colours),
        '<p class="dim">The quorum of a real run decided, in virtual time. Waiting is a share of the workers\' time; what is used is '
        "in examples where a batch size was given, else in gradients.</p>",
    ]
    return p.page(f"{sweep.title}: torchquorum", body)


def _row(run: SimulatedRule) -> list[str]:
    f = run.figures
    return [
        run.name,
        number(f.updates_per_s),
        f"{f.aggregate_mean:.3g}",
        number(f.examples_per_s),
        f"{100 * sum(f.waiting.values()):.0f} %",
        f"{f.staleness_mean:.2f}",
        f"{100 * sum(f.refused.values()) / f.gradients:.1f} %" if f.gradients else "-",
        number(f.failures),
    ]


def simulation_picture(sweep: SimulatedSweep) -> Scene:
    """Returns all charts as one scene, for the PNG."""
    return picture(simulation_charts(sweep), sweep.title, sweep.below, describe_sweep(sweep))


def as_json(sweep: SimulatedSweep) -> dict[str, Any]:
    """Returns the figures as data."""
    found: dict[str, Any] = {
        "scenario": sweep.below,
        "rules": [{"name": r.name} | r.figures.to_dict() for r in sweep.runs],
    }
    if sweep.recorded is not None:
        found["measured_updates_per_s"] = sweep.recorded.updates_per_s
    return found
