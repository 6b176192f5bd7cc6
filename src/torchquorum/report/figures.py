"""The figures of a run, computed from its history.

Pure: a history in, numbers out. Called by the pages. What always holds: a figure comes from recorded data only, and is None or
NaN where the data does not suffice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torchquorum.report.history import History

SLOWER = 1.25  # a worker this much slower than the median of the others is a straggler
BINS = 120
LAST = 20  # the last loss is the mean over one of so many parts of a run


@dataclass(kw_only=True)
class WorkerFigures:
    """One worker's part in a run.

    Attributes:
        index: Which worker.
        batches: Number of its gradients.
        used: Number of its accepted gradients.
        refused: Number of its refused gradients, by reason.
        took_s: Median seconds per gradient, computing and sending.
        busy_s: Total of these seconds.
        waited_s: Total seconds between a gradient and the worker's release.
        staleness: Mean staleness of its accepted gradients.
        batches_per_s: From its first gradient to its last.
    """

    index: int
    batches: int
    used: int
    refused: dict[str, int]
    took_s: float
    busy_s: float
    waited_s: float
    staleness: float
    batches_per_s: float

    @property
    def waiting_share(self) -> float:
        """Returns the share of its time that it waited."""
        total = self.busy_s + self.waited_s
        return self.waited_s / total if total > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class OptimizerFigures:
    """What was made of one of several optimizers.

    Attributes:
        name: What it is called.
        rule: Its rule.
        updates: How many updates were made.
        batches: Number of its gradients.
        refused: Number of those that were refused, without those that came after the last step.
        staleness: Mean staleness of its accepted gradients.
        loss: The mean loss of its last gradients, NaN where none was recorded.
        norm: The median norm of its accepted gradients, NaN where it is not known.
    """

    name: str
    rule: str
    updates: int
    batches: int
    refused: int
    staleness: float
    loss: float
    norm: float


@dataclass(kw_only=True)
class Straggler:
    """The slowest worker, and what it costs.

    Attributes:
        index: Which worker.
        times: How many times slower than the median of the others.
        others_wait: The share of their time that the others waited.
        updates_per_s: The speed of the run.
        without: The estimated speed if this worker had been as fast as the median of the others.
    """

    index: int
    times: float
    others_wait: float
    updates_per_s: float
    without: float


@dataclass(kw_only=True)
class Figures:
    """A run in numbers."""

    updates: int
    batches: int
    used: int
    seconds: float
    workers: list[WorkerFigures]
    refused: dict[str, int] = field(default_factory=dict)
    staleness_mean: float = 0.0
    staleness_max: int = 0
    staleness: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=int))
    straggler: Straggler | None = None
    optimizers: list[OptimizerFigures] = field(default_factory=list)  # where there are several

    @property
    def updates_per_s(self) -> float:
        """Returns updates per second of training."""
        return self.updates / self.seconds if self.seconds > 0 else 0.0

    @property
    def batches_per_s(self) -> float:
        """Returns gradients per second of training, refused ones included."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0

    @property
    def waiting_share(self) -> float:
        """Returns the share of all workers' time that was spent waiting."""
        total = sum(w.busy_s + w.waited_s for w in self.workers)
        return sum(w.waited_s for w in self.workers) / total if total > 0 else 0.0

    @property
    def wasted(self) -> int:
        """Returns the batches that became part of no update."""
        return self.batches - self.used


def figure(history: History) -> Figures:
    """Computes a run's figures."""
    workers = [_figure_worker(history, int(i)) for i in np.unique(history.worker)]
    late = history.reason == "past last step"  # the run was over: not counted as waste
    refused: dict[str, int] = {}
    for w in workers:
        for reason, count in w.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    staleness = (history.met - history.version)[history.accepted]
    made = [max(0, history.last_version_of(k) - history.first_version_of(k)) for k in range(len(history.optimizers))]
    figures = Figures(
        updates=sum(made),
        batches=int((~late).sum()),
        used=int(history.accepted.sum()),
        seconds=history.seconds,
        workers=workers,
        refused=refused,
        staleness_mean=float(staleness.mean()) if len(staleness) else 0.0,
        staleness_max=int(staleness.max()) if len(staleness) else 0,
        staleness=np.bincount(np.maximum(staleness, 0)) if len(staleness) else np.zeros(0, dtype=int),
    )
    figures.straggler = find_straggler(history, figures)
    if len(made) > 1:
        figures.optimizers = [_figure_optimizer(history, k, updates) for k, updates in enumerate(made)]
    return figures


def _figure_optimizer(history: History, track: int, updates: int) -> OptimizerFigures:
    own = (history.track == track) & (history.reason != "past last step")
    used = own & history.accepted
    losses = history.loss[own & np.isfinite(history.loss)]
    norms = history.norm[used & np.isfinite(history.norm)]
    return OptimizerFigures(
        name=history.optimizers[track],
        rule=history.rules[track],
        updates=updates,
        batches=int(own.sum()),
        refused=int((own & ~history.accepted).sum()),
        staleness=float((history.met - history.version)[used].mean()) if used.any() else 0.0,
        loss=float(losses[-max(1, len(losses) // LAST) :].mean()) if len(losses) else float("nan"),
        norm=float(np.median(norms)) if len(norms) else float("nan"),
    )


def _figure_worker(history: History, index: int) -> WorkerFigures:
    own = history.worker == index
    clock, took, accepted = history.clock[own], history.took_s[own], history.accepted[own]
    reasons, counts = np.unique(history.reason[own & ~history.accepted].astype(str), return_counts=True)
    gaps = np.diff(clock) - took[1:]  # from a gradient to the release that followed it
    staleness = (history.met - history.version)[own & history.accepted]
    span = float(clock[-1] - clock[0]) if len(clock) > 1 else 0.0
    return WorkerFigures(
        index=index,
        batches=int(own.sum()),
        used=int(accepted.sum()),
        refused={str(r): int(c) for r, c in zip(reasons, counts, strict=True)},
        took_s=float(np.nanmedian(took)) if not np.isnan(took).all() else float("nan"),
        busy_s=float(np.nansum(took)),
        waited_s=float(np.nansum(np.maximum(gaps, 0.0))),
        staleness=float(staleness.mean()) if len(staleness) else 0.0,
        batches_per_s=(len(clock) - 1) / span if span > 0 else 0.0,
    )


def find_straggler(history: History, figures: Figures) -> Straggler | None:
    """Returns the slowest worker if it is clearly slower than the others, and an estimate of what it costs.

    With rounds, the cost is the time between the last gradient of the others and its own. Without rounds it does not
    block the others: the cost is what it contributes less than they do, plus what they waited.
    """
    timed = [w for w in figures.workers if np.isfinite(w.took_s) and w.batches >= 3]
    if len(timed) < 2 or figures.seconds <= 0:
        return None
    slowest = max(timed, key=lambda w: w.took_s)
    others = [w for w in timed if w is not slowest]
    usual = float(np.median([w.took_s for w in others]))
    if usual <= 0 or slowest.took_s < SLOWER * usual:
        return None
    wait_s, busy_s = sum(w.waited_s for w in others), sum(w.busy_s for w in others)
    made = figures.updates_per_s
    per_update = figures.used / figures.updates if figures.updates else 1.0
    if "Sync" in history.rule or per_update > 1.5:
        lost_s = _seconds_rounds_waited(history, slowest.index)
        without = figures.updates / max(figures.seconds - lost_s, 1e-9)
    else:
        could = sum(w.waited_s / w.took_s for w in others if w.took_s > 0)
        less = max(0.0, figures.seconds / usual - slowest.batches) if slowest.batches else 0.0
        without = made + (could + less) / figures.seconds / max(per_update, 1.0)
    return Straggler(
        index=slowest.index,
        times=slowest.took_s / usual,
        others_wait=wait_s / (wait_s + busy_s) if wait_s + busy_s > 0 else 0.0,
        updates_per_s=made,
        without=max(made, without),
    )


def _seconds_rounds_waited(history: History, slowest: int) -> float:
    """Returns how long rounds waited for one worker alone, after the last gradient of all others had arrived."""
    lost_s = 0.0
    for track in range(len(history.optimizers)):
        chosen = history.accepted & history.kept & (history.track == track)
        lost_s += _waited_in_rounds(history.met[chosen], history.clock[chosen], history.worker[chosen], slowest)
    return lost_s


def _waited_in_rounds(met: np.ndarray, clock: np.ndarray, worker: np.ndarray, slowest: int) -> float:
    if len(met) < 2:
        return 0.0
    last = np.flatnonzero(np.diff(met, append=met[-1] + 1))  # the gradient that closed each round
    with_others = last[(last > 0) & (worker[last] == slowest)]
    same_round = with_others[met[with_others] == met[with_others - 1]]
    return float((clock[same_round] - clock[same_round - 1]).sum())


@dataclass(frozen=True)
class Curve:
    """Many points, averaged over equal bins of the x axis; 80 % of the points lie between low and high."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


def smooth(x: np.ndarray, y: np.ndarray, bins: int = BINS) -> Curve:
    """Averages points over equal bins of the x axis."""
    good = np.isfinite(y)
    x, y = np.asarray(x, dtype=float)[good], np.asarray(y, dtype=float)[good]
    if not len(x):
        return Curve([], [], [], [])
    parts = max(1, min(bins, len(x) // 4))
    span = x.max() - x.min()
    place = (
        np.minimum(((x - x.min()) / span * parts).astype(int), parts - 1) if span > 0 else np.zeros(len(x), dtype=int)
    )
    order = np.argsort(place, kind="stable")
    x, y, place = x[order], y[order], place[order]
    cuts = np.flatnonzero(np.diff(place)) + 1
    groups = list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))
    return Curve(
        [float(gx.mean()) for gx, _ in groups],
        [float(gy.mean()) for _, gy in groups],
        [float(np.quantile(gy, 0.1)) for _, gy in groups],
        [float(np.quantile(gy, 0.9)) for _, gy in groups],
    )


def rate_over_time(times: np.ndarray, seconds: float, bins: int = 60) -> tuple[list[float], list[float]]:
    """Returns the rate of events per second over the run, as bin centres and rates."""
    if len(times) < 2 or seconds <= 0:
        return [], []
    parts = max(2, min(bins, len(times) // 5))
    counts, edges = np.histogram(times, bins=parts, range=(0.0, seconds))
    return [float(m) for m in (edges[1:] + edges[:-1]) / 2], [float(c) for c in counts / (seconds / parts)]
