"""A comparison in plain words, computed from its figures and nothing else.

What always holds: a difference is called one only where it is larger than what chance makes of such a measurement; where the
figures do not suffice for a sentence, there is no sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchquorum.pictures.scales import number

if TYPE_CHECKING:
    from torchquorum.pictures.compare_page import Run

CLOSE = 0.004  # two accuracies that differ by less are the same, as far as 10,000 test images can tell
LEVELS = (0.99, 0.985, 0.98, 0.975, 0.97, 0.96, 0.95, 0.94, 0.92, 0.9, 0.85, 0.8, 0.7, 0.5)
SMALL = 0.05
UNEQUAL = 1.6


def read_comparison(runs: Sequence[Run]) -> list[str]:
    """Returns what the figures of a comparison say, in sentences."""
    runs = [r for r in runs if r.figures.batches]
    if len(runs) < 2:
        return []
    lines = [_slowness(runs), _best(runs), _race(runs), *_rule_by_rule(runs), _unequal(runs)]
    return [line for line in lines if line]


def _slowness(runs: Sequence[Run]) -> str:
    found = [r.figures.straggler for r in runs if r.figures.straggler is not None]
    if not found:
        return "No worker was a straggler: the rules differ little where all workers are equally fast."
    index = max({s.index for s in found}, key=lambda i: sum(s.index == i for s in found))
    times = [s.times for s in found if s.index == index]
    low, high = min(times), max(times)
    how = f"{low:.1f}" if high - low < 0.15 else f"{low:.1f} to {high:.1f}"
    return f"Worker {index} was the slow one: a batch took it {how} times as long as the others."


def _best(runs: Sequence[Run]) -> str:
    """Who was most accurate when the budget was spent, and who came so near that it may be chance."""
    known = sorted(((r.accuracy, r) for r in runs if r.accuracy is not None), key=lambda kr: -kr[0])
    if len(known) < 2:
        return ""
    best, first = known[0]
    near = [r.name for a, r in known[1:] if best - a <= CLOSE]
    last, worst = known[-1]
    said = f"At the end {first.name} was most accurate, {100 * best:.2f} %"
    if len(near) == len(known) - 1:
        return f"{said}; the others came within {100 * CLOSE:.1f} points, which may be chance."
    if near:
        said += f"; {_words(near)} came within {100 * CLOSE:.1f} points, which may be chance"
    return f"{said}; {worst.name} was least accurate, {100 * last:.2f} %."


def _race(runs: Sequence[Run]) -> str:
    """How long each took to the highest accuracy that all reached, or nearly all."""
    curves = {r.name: r.history.measured("accuracy")[1:] for r in runs}
    curves = {n: c for n, c in curves.items() if len(c[1]) > 1}
    for level in LEVELS:
        reached = {n: float(clock[np.argmax(v >= level)]) for n, (clock, v) in curves.items() if (v >= level).any()}
        if len(curves) >= 2 and len(reached) == len(curves):
            order = sorted(reached, key=lambda n: reached[n])
            shown = ", ".join(f"{n} {number(reached[n])} s" for n in order)
            return f"Time to {100 * level:g} % validation accuracy, which all reached: {shown}."
    return ""


def _rule_by_rule(runs: Sequence[Run]) -> list[str]:
    """What is remarkable of each: waiting, waste, staleness."""
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


def _unequal(runs: Sequence[Run]) -> str:
    """A warning where the machine was not equally free: the same batch took very different times."""
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
        f"Take the speeds with care: a batch of the other workers took {number(1000 * times[low])} ms in {low} and "
        f"{number(1000 * times[high])} ms in {high}. More workers computed at a time there, or the machine had other work."
    )


def _words(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
