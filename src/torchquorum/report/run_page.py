"""The page of one run: figures, charts, sentences and tables from its folder. Called by `torchquorum report`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchquorum.lines import counted
from torchquorum.report import html_page as p
from torchquorum.report.charts import (
    Axis,
    ChartBar,
    LegendEntry,
    Series,
    TimelineRow,
    bar_chart,
    column_chart,
    line_chart,
    timeline,
)
from torchquorum.report.figures import Figures, WorkerFigures, figure, rate_over_time, smooth
from torchquorum.report.history import History
from torchquorum.report.scales import number
from torchquorum.report.scene import Scene
from torchquorum.rules.latest_norms import LatestNorms

SECONDS = Axis(name="time", unit="s", from_zero=True)
STEPS = Axis(name="global step", from_zero=True)
UPDATES = Axis(name="updates of the optimizer", from_zero=True)
OF_OPTIMIZERS = ("c0", "c3", "c2", "c4", "c5", "c6", "c7")
MOST_WORKERS = 24  # rows of a chart; a larger cluster shows its slowest workers
MOST_COLUMNS = 30
LEAST_COLUMNS = 6
WHY = {
    "stale": "older than the rule allows",
    "already in round": "its worker was already counted in that round",
    "past last step": "the run was over",
    "old incarnation": "sent by a process that had been replaced",
    "expired": "its worker had been declared dead",
    "not finite": "it contained NaN or infinity",
}


def run_page(history: History) -> str:
    """Returns the page of a run."""
    figures = figure(history)
    name = history.folder.resolve().name if isinstance(history.folder, Path) else history.folder.name
    body = [
        p.heading(f"Run {name}", _below(history, figures)),
        p.tiles(_tiles(history, figures)),
        p.sentences(describe(history, figures)),
        p.section("How it learned"),
        p.cards(_course_charts(history, figures)),
        p.section("Who did what"),
        p.cards(_worker_charts(history, figures)),
        p.section("Worker by worker"),
        worker_table(figures),
    ]
    if figures.optimizers:
        at = body.index(p.section("Who did what"))
        body[at:at] = [p.section("Optimizer by optimizer"), optimizer_table(figures)]
    if figures.refused:
        rows = [
            (f"{r}: {number(c)}", WHY.get(r, "")) for r, c in sorted(figures.refused.items(), key=lambda kv: -kv[1])
        ]
        body += [p.section("Refused gradients"), p.word_table(rows)]
    if history.checkpoints:
        body += [p.section("Checkpoints"), _checkpoint_table(history)]
    rows = configuration(history)
    body += [p.section("Configuration"), p.word_table(rows)] if rows else []
    if history.missing:
        body += [p.section("Missing"), p.sentences(history.missing)]
    return p.page(f"{name}: torchquorum", body)


def _below(history: History, figures: Figures) -> str:
    rules = ", ".join(f"{name} {rule}" for name, rule in zip(history.optimizers, history.rules, strict=True))
    words = [
        rules if figures.optimizers else history.rule,
        f"{len(figures.workers)} workers" if len(figures.workers) != 1 else "1 worker",
    ]
    if len(history.at):
        words.append("began " + time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(history.at.min())))
    words.append("still running" if history.is_running else f"{number(history.seconds)} s of training")
    if history.is_interrupted:
        words.append("interrupted")
    return ", ".join(words)


def _tiles(history: History, figures: Figures) -> list[tuple[str, str]]:
    shown = [(_step_words(history), number(history.last_version))]
    _, _, measured = history.measured("accuracy")
    if history.accuracy is not None:
        shown.append(("final accuracy", f"{100 * history.accuracy:.2f} %"))
    elif len(measured):
        shown.append(("validation accuracy, last measured", f"{100 * measured[-1]:.2f} %"))
    shown += [(f"updates of {of.name}", number(of.updates)) for of in figures.optimizers[1:]]
    if figures.batches:
        shown += [
            ("updates per second", number(figures.updates_per_s)),
            ("batches per second", number(figures.batches_per_s)),
            ("mean staleness", f"{figures.staleness_mean:.2f}"),
            ("batches refused", f"{100 * figures.wasted / figures.batches:.1f} %"),
            ("of worker time spent waiting", f"{100 * figures.waiting_share:.0f} %"),
        ]
    return shown


def _step_words(history: History) -> str:
    of = f" of {number(history.last_step)}" if history.last_step is not None else ""
    return f"global step{of}{', interrupted' if history.is_interrupted else ''}"


def describe(history: History, figures: Figures) -> list[str]:
    """Returns the findings, in sentences."""
    lines: list[str] = []
    slow = figures.straggler
    if slow is not None:
        cost = slow.without - slow.updates_per_s
        lines.append(
            f"Worker {slow.index} is the straggler: a batch takes it {slow.times:.1f} times as long as the others. "
            f"The others waited {100 * slow.others_wait:.0f} % of their time."
        )
        if cost > 0.02 * slow.updates_per_s:
            lines.append(
                f"It costs about {number(cost)} updates/s: the run made {number(slow.updates_per_s)}, and would have made "
                f"about {number(slow.without)} if it had been as fast as the others."
            )
        else:
            lines.append("It costs almost no updates/s.")
    elif len([w for w in figures.workers if np.isfinite(w.took_s)]) > 1:
        lines.append("No worker is a straggler: their times per batch differ by less than a quarter.")
    refused = {r: c for r, c in figures.refused.items() if r != "past last step"}
    if refused:
        most = max(refused, key=lambda r: refused[r])
        share = 100 * sum(refused.values()) / max(1, figures.batches)
        lines.append(
            f"{number(sum(refused.values()))} batches ({share:.1f} %) were refused, most of them as {most!r}: {WHY.get(most, '')}."
        )
    lines += _large_gradient(history)
    died = [e for e in history.events if e.event == "died"]
    back = [e for e in history.events if e.event == "came back"]
    if died:
        lines.append(f"{counted(len(died), 'worker')} died, {len(back)} came back.")
    chosen = [int(e.values["aggregate"]) for e in history.events if e.event == "chose"]
    if chosen:
        lines.append(
            f"The rule chose {counted(len(chosen), 'time')} how many gradients make an update: {min(chosen)} at least, "
            f"{max(chosen)} at most, {chosen[-1]} at the end."
        )
    if history.restarts:
        lines.append(
            f"The run was started again {counted(history.restarts, 'time')}; the time axis skips the time in between."
        )
    lost = int((history.accepted & ~history.kept).sum())
    if lost:
        lines.append(f"{number(lost)} gradients were computed again after a restore: their updates had not been saved.")
    return lines


def _large_gradient(history: History) -> list[str]:
    """Says whose gradient was far larger than the others before the first one that was not finite."""
    bad = np.flatnonzero(history.reason == "not finite")
    if not len(bad):
        return []
    norms = LatestNorms()
    for i in range(int(bad[0])):
        if history.accepted[i] and np.isfinite(history.norm[i]) and history.track[i] == history.track[bad[0]]:
            norms.note(*(a[i].item() for a in (history.norm, history.worker, history.local_step, history.met)))
    found = norms.take_largest()
    return [f"Before the first gradient that was not finite, one stands out: {found}."] if found is not None else []


def loss_charts(history: History) -> list[Scene]:
    """Returns the loss over time and over steps: of the gradients, and of the validation set where it was measured."""
    kept = history.kept
    axis = loss_axis(history.loss)
    steps, clock, losses = history.measured("validation/loss")
    found = []
    several = len(history.optimizers) > 1
    over_steps = ("Loss over updates", UPDATES, history.met) if several else ("Loss over steps", STEPS, history.met)
    for title, x, values in (("Loss over time", SECONDS, history.clock), over_steps):
        lines: list[Series] = []
        for k, optimizer in enumerate(history.optimizers):
            own = kept & (history.track == k)
            curve = smooth(values[own], history.loss[own])
            name = optimizer or ("training" if len(losses) > 1 else "")
            colour = OF_OPTIMIZERS[k % len(OF_OPTIMIZERS)]
            lines.append(Series(name=name, x=curve.x, y=curve.y, low=curve.low, high=curve.high, colour=colour))
        if len(losses) > 1:
            at = clock if x is SECONDS else steps
            lines.append(Series(name="validation", x=list(at), y=list(losses), colour="c1", dash=(5, 3)))
        found.append(line_chart(title, lines, x, axis, empty="no loss recorded: call optimizer.step(loss=loss)"))
    return found


def chosen_charts(history: History) -> list[Scene]:
    """Returns how many gradients an update took over time, where the rule chose that while the run went on."""
    chosen = [e for e in history.events if e.event == "chose"]
    if not chosen:
        return []
    lines: list[Series] = []
    for k, name in enumerate(history.optimizers):
        own = [e for e in chosen if e.values.get("optimizer", "") == name]
        x, y = [0.0], [float(history.config.get("num_workers") or chosen[0].values["aggregate"])]
        for at, event in zip(history.clock_of(np.array([e.at for e in own], dtype=float)), own, strict=True):
            x += [float(at), float(at)]
            y += [y[-1], float(event.values["aggregate"])]
        colour = OF_OPTIMIZERS[k % len(OF_OPTIMIZERS)] if name else "c5"
        lines += [Series(name=name, x=[*x, max(history.seconds, x[-1])], y=[*y, y[-1]], colour=colour)] if own else []
    return [line_chart("Gradients waited for", lines, SECONDS, Axis(name="gradients per update", from_zero=True))]


def loss_axis(losses: np.ndarray) -> Axis:
    """Returns an axis for losses: logarithmic if they span a wide range."""
    positive = losses[np.isfinite(losses) & (losses > 0)]
    negative = bool((losses[np.isfinite(losses)] <= 0).any())
    wide = len(positive) > 0 and not negative and positive.max() > 8 * np.quantile(positive, 0.02)
    return Axis(name="loss, log scale", kind="log") if wide else Axis(name="loss")


def accuracy_charts(history: History) -> list[Scene]:
    """Returns the accuracy over time and over steps."""
    steps, clock, values = history.measured("accuracy")
    axis = accuracy_axis([float(v) for v in values])
    empty = "no accuracy measured: use tq.EvaluateHook or session.measure(accuracy=...)"
    found = []
    for title, x, at in (
        ("Validation accuracy over time", SECONDS, clock),
        ("Validation accuracy over steps", STEPS, steps),
    ):
        line = Series(
            name="", x=[float(v) for v in at], y=[float(v) for v in values], colour="c2", dots=len(values) < 40
        )
        found.append(line_chart(title, [line], x, axis, empty=empty))
    return found


def accuracy_axis(values: Sequence[float]) -> Axis:
    """Returns an axis for accuracies: near 100 % it is logarithmic in the error."""
    if len(values) and max(values) > 0.8:
        return Axis(name="accuracy, spread towards 100", unit="%", kind="share")
    return Axis(name="accuracy as a share", from_zero=True)


def _worker_charts(history: History, figures: Figures) -> list[Scene]:
    shown = sorted(figures.workers, key=lambda w: -w.took_s if np.isfinite(w.took_s) else 0.0)[:MOST_WORKERS]
    shown.sort(key=lambda w: w.index)
    more = f" ({len(shown)} slowest of {len(figures.workers)})" if len(figures.workers) > len(shown) else ""
    contributions = [
        ChartBar(
            name=f"worker {w.index}",
            parts=[(w.used, "c0", "used"), (sum(w.refused.values()), "c1", "refused")],
            note=f"{100 * w.used / max(1, figures.used):.0f} % of all used",
        )
        for w in shown
    ]
    times = [
        ChartBar(
            name=f"worker {w.index}",
            parts=[(w.busy_s, "c2", "computing and sending"), (w.waited_s, "c4", "waiting")],
            note=f"waited {100 * w.waiting_share:.0f} %",
        )
        for w in shown
    ]
    charts = [
        bar_chart(
            "Who contributed" + more,
            contributions,
            Axis(name="gradients"),
            keys=[LegendEntry(name="used", colour="c0"), LegendEntry(name="refused", colour="c1")],
        ),
        bar_chart(
            "Computing and waiting" + more,
            times,
            Axis(name="time", unit="s"),
            keys=[LegendEntry(name="computing and sending", colour="c2"), LegendEntry(name="waiting", colour="c4")],
            empty="this ledger has no time per gradient",
        ),
        _time_chart(shown, more),
        _timeline(history),
    ]
    if set(figures.refused) - {"past last step"}:
        rows = sorted(figures.refused.items(), key=lambda kv: -kv[1])
        bars = [ChartBar(name=r, parts=[(c, "c1", "")], note=number(c)) for r, c in rows]
        charts.append(bar_chart("Refused, and why", bars, Axis(name="gradients")))
    return charts


def _course_charts(history: History, figures: Figures) -> list[Scene]:
    rates: list[Series] = []
    for k, name in enumerate(history.optimizers):
        x, y = rate_over_time(history.update_times(k), history.seconds)
        rates.append(Series(name=name, x=x, y=y, colour=OF_OPTIMIZERS[k % len(OF_OPTIMIZERS)] if name else "c3"))
    rate = line_chart(
        "Updates per second",
        rates,
        SECONDS,
        Axis(name="updates per second", from_zero=True),
        empty="too few updates for a curve",
    )
    loss, accuracy = loss_charts(history), accuracy_charts(history)
    return [loss[0], accuracy[0], rate, loss[1], accuracy[1], staleness_chart(figures), *chosen_charts(history)]


def _time_chart(workers: Sequence[WorkerFigures], more: str) -> Scene:
    bars = [
        ChartBar(name=f"worker {w.index}", parts=[(1000 * w.took_s, "c5", "")], note=f"{number(1000 * w.took_s)} ms")
        for w in workers
        if np.isfinite(w.took_s)
    ]
    return bar_chart(
        "Time per batch" + more, bars, Axis(name="median time", unit="ms"), empty="this ledger has no time per gradient"
    )


def staleness_chart(figures: Figures) -> Scene:
    """Returns the histogram of the staleness of accepted gradients; a long tail gets wider columns."""
    counts = figures.staleness
    width = max(1, -(-len(counts) // MOST_COLUMNS))
    columns = []
    for start in range(0, len(counts), width):
        name = str(start) if width == 1 else f"{start}-{start + width - 1}"
        columns.append((name, float(counts[start : start + width].sum())))
    columns += [(str(n), 0.0) for n in range(len(columns), LEAST_COLUMNS)] if columns and width == 1 else []
    note = f"mean {figures.staleness_mean:.2f}, at most {figures.staleness_max}"
    x = Axis(name="staleness", unit="versions")
    return column_chart("Staleness of used gradients", columns, x, Axis(name="gradients"), "c3", note)


def _timeline(history: History) -> Scene:
    times = history.clock_of(np.array([e.at for e in history.events], dtype=float))
    end = max([history.seconds, *(float(t) for t in times)])
    rows_by_worker: dict[int, TimelineRow] = {}
    since: dict[int, float] = {}
    saved = TimelineRow(name="checkpoints")

    def close(worker: int, at: float) -> None:
        if worker in since:
            rows_by_worker[worker].spans.append((since.pop(worker), at))

    marks = {"joined": "c2", "came back": "c5", "died": "c1", "left": "c6"}
    for event in history.events:
        at = float(history.clock_of(np.array([event.at]))[0])
        if event.event == "saved":
            saved.marks.append((min(at, end), "c3", event.text))
        elif event.event == "began":
            for worker in list(since):
                close(worker, at)
        elif event.worker >= 0 and event.event in marks:
            entry = rows_by_worker.setdefault(event.worker, TimelineRow(name=f"worker {event.worker}"))
            close(event.worker, at)
            if event.event in ("joined", "came back"):
                since[event.worker] = at
            entry.marks.append((min(at, end), marks[event.event], f"{event.event} {event.text}".strip()))
    for worker in list(since):
        close(worker, end)
    shown = [rows_by_worker[i] for i in sorted(rows_by_worker)][:MOST_WORKERS]
    named = {"c2": "joined", "c1": "died", "c5": "came back", "c6": "left", "c3": "saved"}
    rows = [*shown, saved] if saved.marks else shown
    used = {colour for entry in rows for _, colour, _ in entry.marks}
    keys = [LegendEntry(name=name, colour=colour) for colour, name in named.items() if colour in used]
    return timeline("Who was there", rows, end, keys)


def optimizer_table(figures: Figures) -> str:
    """Returns the table of a run's optimizers, where there are several."""
    head = ["optimizer", "rule", "updates", "updates/s", "gradients", "refused", "mean staleness", "last loss", "norm"]
    rows = [
        [
            of.name,
            of.rule,
            number(of.updates),
            number(of.updates / figures.seconds) if figures.seconds > 0 else "-",
            number(of.batches),
            number(of.refused),
            f"{of.staleness:.2f}",
            f"{of.loss:.4g}" if np.isfinite(of.loss) else "-",
            f"{of.norm:.3g}" if np.isfinite(of.norm) else "-",
        ]
        for of in figures.optimizers
    ]
    return p.table(head, rows, [OF_OPTIMIZERS[k % len(OF_OPTIMIZERS)] for k in range(len(rows))])


def worker_table(figures: Figures) -> str:
    """Returns the table of all workers."""
    head = ["worker", "batches", "used", "refused", "batches/s", "ms per batch", "waited", "mean staleness"]
    rows = [
        [
            f"worker {w.index}" + ("  (straggler)" if figures.straggler and figures.straggler.index == w.index else ""),
            number(w.batches),
            number(w.used),
            number(sum(w.refused.values())),
            number(w.batches_per_s),
            number(1000 * w.took_s),
            f"{100 * w.waiting_share:.0f} %" if w.busy_s else "-",
            f"{w.staleness:.2f}",
        ]
        for w in figures.workers
    ]
    return p.table(head, rows)


def _checkpoint_table(history: History) -> str:
    rows = []
    for info in history.checkpoints:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.created_at)) if info.created_at else ""
        rows.append(
            [info.path.name, number(info.step), when, f"{info.size_bytes / 1e6:.1f} MB", info.problem or "good"]
        )
    return p.table(["checkpoint", "global step", "saved", "size", "state"], rows)


def _of_optimizer(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what a configuration has of one optimizer."""
    rows: list[tuple[str, str]] = []
    optimizer = config.get("optimizer") or {}
    for i, group in enumerate(optimizer.get("groups", [])):
        given = ", ".join(f"{k}={v}" for k, v in group.items() if v not in (None, False, 0) and k != "params")
        rows.append((f"optimizer, group {i}" if i else "optimizer", f"{optimizer.get('name')}({given})"))
    schedule = config.get("schedule")
    if schedule:
        given = ", ".join(f"{k}={v}" for k, v in schedule.get("arguments", {}).items())
        rows.append(("schedule", f"{schedule.get('name')}({given})"))
    if config.get("average"):
        rows.append(("moving averages", f"decay {config['average'].get('decay')}"))
    return rows


def _size_of(config: dict[str, Any]) -> str:
    return f"{config['variables']} variables, {number(config.get('values'))} numbers"


def configuration(history: History) -> list[tuple[str, str]]:
    """Returns the configuration as names and values."""
    config, report = history.config, history.report
    each = [config, *(spec for spec in config.get("more") or [] if isinstance(spec, dict))]
    several = len(each) > 1
    rows = [("rule", history.rule)] if history.rule != "unknown" and not several else []
    ps, workers = config.get("num_shards", report.get("ps")), config.get("num_workers", report.get("workers"))
    if ps is not None:
        rows.append(("cluster", f"{ps} ps, {workers} workers"))
    if report.get("transport"):
        rows.append(("transport", str(report["transport"])))
    for of, name, rule in zip(each, history.optimizers, history.rules, strict=False):
        own = [("rule", rule), *_of_optimizer(of)] if several else _of_optimizer(of)
        own += [("model", _size_of(of))] if "variables" in of else []
        rows += [(f"{name}: {what}" if several else what, value) for what, value in own]
    if ps is not None and "placement" in config:
        rows.append(("placement", str(config["placement"])))
    if config:
        rows.append(("last step", number(config["last_step"]) if config.get("last_step") else "none"))
    return [*rows, *_of_start(history.start), ("folder", str(history.folder))]


def _of_start(start: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what is needed to repeat the run."""
    rows = [("command", start.get("command")), ("in folder", start.get("working_folder"))]
    rows += [("batch", start.get("batch_size")), ("seed", start.get("seed"))]
    rows += [
        ("host", start.get("host")),
        ("cores", start.get("cpus")),
        ("devices", ", ".join(start.get("devices") or [])),
    ]
    rows.append(("versions", ", ".join(f"{name} {v}" for name, v in (start.get("versions") or {}).items())))
    return [(name, str(value)) for name, value in rows if value not in (None, "")]
