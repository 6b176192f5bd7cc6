"""Several runs side by side: the colour of each, and the findings in plain sentences, computed from their figures alone.

Used by `compare_page`. What always holds: a difference is reported only if it is larger than chance explains; where the
figures do not suffice for a sentence, there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchquorum.report.charts import DASHES
from torchquorum.report.figures import Figures, figure
from torchquorum.report.history import History
from torchquorum.report.scales import number

CLOSE = 0.004  # a smaller difference between two accuracies is within the noise of 10,000 test images
LEVELS = (0.99, 0.985, 0.98, 0.975, 0.97, 0.96, 0.95, 0.94, 0.92, 0.9, 0.85, 0.8, 0.7, 0.5)
SMALL = 0.05
UNEQUAL = 1.6
_FAMILIES = (
    ("sync:", "c5"),
    ("sync", "c0"),
    ("async:pipeline", "c7"),
    ("async", "c1"),
    ("bounded", "c2"),
    ("buffered", "c3"),
)
_SPARE = ("c4", "c6", "c7", "c3", "c5", "c2", "c1", "c0")


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run of a comparison: its name, history, figures, and colour by role."""

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


def compare_runs(histories: Sequence[tuple[str, History]]) -> list[ComparedRun]:
    """Computes the figures of each run and gives it the colour of its rule, or another colour if that is taken."""
    runs: list[ComparedRun] = []
    for name, history in histories:
        taken = [r.colour for r in runs]
        colour = pick_colour(_rule_of(name, history), taken)
        dash = DASHES[min(taken.count(colour), len(DASHES) - 1)]
        runs.append(ComparedRun(name=name, history=history, figures=figure(history), colour=colour, dash=dash))
    return runs


def pick_colour(rule: str, taken: Sequence[str]) -> str:
    """Returns the colour of a rule, such as sync:2, or another one if that is taken."""
    wanted = next((c for family, c in _FAMILIES if rule.startswith(family)), "c4")
    return wanted if wanted not in taken else next((c for c in _SPARE if c not in taken), wanted)


def _rule_of(name: str, history: History) -> str:
    rule = history.rule.lower().replace("()", "").replace("(aggregate=", ":").replace("(pipeline=true)", ":pipeline")
    return rule.replace("(", ":").rstrip(")") if rule != "unknown" else name


def describe_comparison(runs: Sequence[ComparedRun]) -> list[str]:
    """Returns the findings of a comparison, in sentences."""
    runs = [r for r in runs if r.figures.batches]
    if len(runs) < 2:
        return []
    lines = [_slowness(runs), _best(runs), _race(runs), *_rule_by_rule(runs), _unequal(runs)]
    return [line for line in lines if line]


def _slowness(runs: Sequence[ComparedRun]) -> str:
    found = [r.figures.straggler for r in runs if r.figures.straggler is not None]
    if not found:
        return "No worker was a straggler: the rules differ little where all workers are equally fast."
    index = max({s.index for s in found}, key=lambda i: sum(s.index == i for s in found))
    times = [s.times for s in found if s.index == index]
    low, high = min(times), max(times)
    how = f"{low:.1f}" if high - low < 0.15 else f"{low:.1f} to {high:.1f}"
    return f"Worker {index} was the slow one: a batch took it {how} times as long as the others."


def _best(runs: Sequence[ComparedRun]) -> str:
    """The most accurate run, and those so close that it may be chance."""
    known = sorted(((r.accuracy, r) for r in runs if r.accuracy is not None), key=lambda kr: -kr[0])
    if len(known) < 2:
        return ""
    best, first = known[0]
    near = [r.name for a, r in known[1:] if best - a <= CLOSE]
    last, worst = known[-1]
    said = f"By final accuracy {first.name} was best, {100 * best:.2f} %"
    if len(near) == len(known) - 1:
        return f"{said}; the others came within {100 * CLOSE:.1f} points, which may be chance."
    if near:
        said += f"; {_words(near)} came within {100 * CLOSE:.1f} points, which may be chance"
    return f"{said}; {worst.name} was worst, {100 * last:.2f} %."


def _race(runs: Sequence[ComparedRun]) -> str:
    """When each run was first seen at the highest validation accuracy that all of them reached."""
    curves = {r.name: r.history.measured("accuracy")[1:] for r in runs}
    curves = {n: c for n, c in curves.items() if len(c[1]) > 1}
    for level in LEVELS:
        reached = {n: float(clock[np.argmax(v >= level)]) for n, (clock, v) in curves.items() if (v >= level).any()}
        if len(curves) >= 2 and len(reached) == len(curves):
            order = sorted(reached, key=lambda n: reached[n])
            shown = ", ".join(f"{n} {number(reached[n])} s" for n in order)
            return f"{100 * level:g} % validation accuracy, which all reached, was first seen at: {shown}."
    return ""


def _rule_by_rule(runs: Sequence[ComparedRun]) -> list[str]:
    """What stands out in each run: waiting, waste, staleness."""
    lines = []
    most = max(runs, key=lambda r: r.figures.batches_per_s)
    for r in runs:
        f = r.figures
        said = []
        if f.waiting_share > SMALL:
            said.append(f"its workers waited {100 * f.waiting_share:.0f} % of the time")
        if f.wasted / f.batches > 0.01:
            said.append(f"{100 * f.wasted / f.batches:.0f} % of its batches were refused and wasted")
        if f.staleness_mean > SMALL:
            said.append(f"its gradients were {f.staleness_mean:.1f} versions old on average, {f.staleness_max} at most")
        if r is most:
            said.append(f"it computed the most batches, {number(f.batches_per_s)} per second")
        if said:
            lines.append(
                f"{r.name}: {_words(said)}; {number(f.updates_per_s)} updates/s from {number(f.batches_per_s)} batches/s."
            )
        else:
            lines.append(f"{r.name}: no waiting, no waste, no staleness; {number(f.updates_per_s)} updates/s.")
    return lines


def _unequal(runs: Sequence[ComparedRun]) -> str:
    """A warning if the same batch took very different times, so the machine was not equally free."""
    slow = {s.index for r in runs if (s := r.figures.straggler) is not None}
    times = {}
    for r in runs:
        own = [w.took_s for w in r.figures.workers if w.index not in slow and np.isfinite(w.took_s)]
        if own:
            times[r.name] = float(np.median(own))
    if len(times) < 2 or max(times.values()) < UNEQUAL * min(times.values()):
        return ""
    low, high = min(times, key=lambda n: times[n]), max(times, key=lambda n: times[n])
    return (
        f"Compare the speeds with care: a batch of the other workers took {number(1000 * times[low])} ms in {low} and "
        f"{number(1000 * times[high])} ms in {high}. There, more workers computed at a time, or other programs used the machine."
    )


def _words(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
