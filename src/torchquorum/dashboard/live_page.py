"""What the page shows of a followed run: two parts, figures and charts, which the browser asks for again and again.

Called by the server. What always holds: it is made of the report's own charts and tables, and nothing of it is a link that changes
something.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torchquorum.dashboard.followed import RunOnPage
from torchquorum.report import html_page as p
from torchquorum.report.charts import Axis, Series, line_chart
from torchquorum.report.figures import figure
from torchquorum.report.run_page import WHY, accuracy_axis, accuracy_charts, loss_charts, worker_table
from torchquorum.report.scales import number
from torchquorum.report.scene import Scene

COLOURS = {"running": "c2", "waiting": "c4", "silent": "c1", "over": "c6"}
WORKER_COLOURS = {"computing": "c2", "waiting": "c4", "dead": "c1", "left": "c6"}
FOLLOWED = Axis(name="time on this page", unit="s")
SHOWN_CHECKPOINTS = 8

# Asks for both parts again and again; the charts stay while the pointer is on one of them. A page without its server says so.
SCRIPT = """
const parts = [['now', 1000], ['charts', 3000]], told = document.getElementById('told');
let over = false;
async function turn(name, every) {
  const part = document.getElementById(name);
  try {
    const answer = await fetch(location.pathname.replace(/[^/]*$/, '') + name, {cache: 'no-store'});
    if (!answer.ok) throw new Error(answer.statusText);
    over = answer.headers.get('X-Run') === 'over';
    if (!(name === 'charts' && part.querySelector('.card:hover'))) {
      const left = [...part.querySelectorAll('.scroll')].map(e => e.scrollLeft);
      part.innerHTML = await answer.text();
      [...part.querySelectorAll('.scroll')].forEach((e, i) => { e.scrollLeft = left[i] || 0; });
      if (name === 'charts') point(part);
    }
    told.textContent = '';
  } catch (error) {
    told.textContent = over ? 'The run is over, and this page is not updated any more.'
                            : 'No answer from the dashboard: this page shows what it was told last.';
  }
  setTimeout(turn, every, name, every);
}
for (const [name, every] of parts) setTimeout(turn, every, name, every);
"""
STYLE = """<style>
.state{display:inline-block;border-radius:10px;padding:1px 10px;font-size:13px;font-weight:600;vertical-align:middle;
border:1px solid var(--grid);background:var(--surface)}
nav{margin:0 0 14px}nav a{color:inherit;margin-right:16px}nav a.here{font-weight:600;text-decoration:none}
#told{color:var(--c1);font-weight:600}progress{width:100%;height:10px;accent-color:var(--c2)}
</style>"""


def whole_page(shown: RunOnPage, others: Sequence[tuple[str, str]]) -> str:
    """Returns the page of a run; `others` are the links to all runs that are followed, if there are several."""
    nav = "".join(
        f'<a href="{escape(link)}"{" class=here" if name == shown.name else ""}>{escape(name)}</a>'
        for link, name in others
    )
    body = [
        STYLE,
        f"<nav>{nav}</nav>" if len(others) > 1 else "",
        '<p id="told" role="status"></p>',
        f'<div id="now">{now(shown)}</div>',
        f'<div id="charts">{charts(shown)}</div>',
        "<noscript><p>Without JavaScript this page does not update itself: load it again.</p></noscript>",
    ]
    return p.page(f"{shown.name}: torchquorum", body, below="This page is read only and updates itself.", script=SCRIPT)


def now(shown: RunOnPage) -> str:
    """Returns what changes every second: the state, figures, and a row per worker."""
    status = shown.status
    state = f'<span class="state" style="color:var(--{COLOURS[shown.state]})">{shown.state}</span>'
    parts = [f"<h1>{escape(shown.name)} {state}</h1>", f'<p class="dim">{escape(_below(shown))}</p>']
    if shown.note:
        parts.append(f"<p><b>{escape(shown.note)}</b></p>")
    if "per_worker" not in status:
        return "\n".join(parts)
    step, last = status["global_step"], status["last_step"]
    if last:
        parts.append(f'<progress max="{last}" value="{step}">{step} of {last}</progress>')
    parts += [p.tiles(_tiles(shown)), p.section("Workers"), _workers(shown)]
    refused = _refused(status)
    if refused:
        parts += [p.section("Refused gradients"), p.word_table(refused)]
    return "\n".join(parts)


def charts(shown: RunOnPage) -> str:
    """Returns the curves, and what the run's folder has."""
    history = shown.history
    has_ledger = history is not None and len(history.at) > 0
    if has_ledger and history is not None:
        scenes = [loss_charts(history)[0], accuracy_charts(history)[0]]
    else:
        scenes = [_curve("Loss", "loss", shown, "c0")]
        if any(point.accuracy is not None for point in shown.points):
            scenes.append(_curve("Accuracy", "accuracy", shown, "c2"))
    parts = [p.section("How it learns"), p.cards([*scenes, _rate(shown)] if shown.points else scenes)]
    if has_ledger and history is not None and not shown.status:
        parts += [p.section("Workers"), worker_table(figure(history))]
    if history is not None and history.checkpoints:
        rows = [
            [
                info.path.name,
                number(info.step),
                time.strftime("%H:%M:%S", time.localtime(info.created_at)) if info.created_at else "",
                f"{info.size_bytes / 1e6:.1f} MB",
                info.problem or "good",
            ]
            for info in history.checkpoints[: -SHOWN_CHECKPOINTS - 1 : -1]
        ]
        parts += [
            p.section("Newest checkpoints"),
            p.table(["checkpoint", "global step", "saved", "size", "state"], rows),
        ]
    return "\n".join(parts)


def _below(shown: RunOnPage) -> str:
    status = shown.status
    if "per_worker" in status:
        words = [status["rule"], f"{status['ps']} ps", f"{len(status['live'])} of {status['workers']} workers alive"]
        return ", ".join([*words, status["transport"]] if status["transport"] else words)
    return shown.history.rule if shown.history is not None else ""


def _tiles(shown: RunOnPage) -> list[tuple[str, str]]:
    status = shown.status
    step, last = status["global_step"], status["last_step"]
    found = [
        (f"{step:,}", f"global step, of {last:,}" if last else "global step"),
        (number(shown.updates_per_s), "updates per second, last 10 s"),
        ("-" if status["loss"] is None else f"{status['loss']:.4g}", "loss of the newest gradient"),
        (f"{status['staleness_mean']:.2f}", "mean staleness"),
        (number(status["refused"]), "gradients refused"),
    ]
    if status["accuracy"] is not None:
        found.insert(3, (f"{100 * status['accuracy']:.2f} %", "final accuracy"))
    if status.get("memory_bytes"):
        found.append((_bytes(status["memory_bytes"]), "memory of ps task 0"))
    if status.get("moved_bytes"):
        found.append((_bytes(status["moved_bytes"]), "moved between ps task 0 and workers"))
    if status["saved_step"] is not None:
        found.append((number(status["saved_step"]), "newest checkpoint, global step"))
    return [(name, value) for value, name in found]


def _workers(shown: RunOnPage) -> str:
    head = ["worker", "state", "batches", "batches/s", "loss", "staleness", "refused", "waits", "for"]
    rows, colours = [], []
    for index, worker in sorted(shown.status["per_worker"].items(), key=lambda entry: int(entry[0])):
        speed, waits = shown.speed_of(index) or (0.0, 0.0)
        alive = worker["state"] in ("computing", "waiting")
        rows.append(
            [
                f"worker {index}",
                worker["state"],
                f"{worker['batches']:,}",
                number(speed) if alive else "-",
                "-" if worker["loss"] is None else f"{worker['loss']:.4g}",
                f"{worker['staleness_mean']:.2f}",
                f"{worker['refused']:,}",
                f"{100 * waits:.0f} %" if alive else "-",
                shown.waits_for(index) if alive else "",
            ]
        )
        colours.append(WORKER_COLOURS.get(worker["state"], "c6"))
    return p.table(head, rows, colours)


def _refused(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    reasons: dict[str, int] = {}
    for worker in status["per_worker"].values():
        for reason, count in worker["refused_reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    ordered = sorted(reasons.items(), key=lambda entry: -entry[1])
    return [(f"{reason}: {number(count)}", WHY.get(reason, "")) for reason, count in ordered]


def _curve(title: str, name: str, shown: RunOnPage, colour: str) -> Scene:
    found = [(point.at, value) for point in shown.points if (value := getattr(point, name)) is not None]
    line = Series(
        name="", x=[at for at, _ in found], y=[value for _, value in found], colour=colour, dots=len(found) < 3
    )
    axis = accuracy_axis([value for _, value in found]) if name == "accuracy" else Axis(name=name)
    return line_chart(f"{title} over time", [line], FOLLOWED, axis, empty=f"no {name} yet")


def _rate(shown: RunOnPage) -> Scene:
    points, x, y = shown.points, list[float](), list[float]()
    back = 0
    for point in points:
        while point.at - points[back].at > 5.0:
            back += 1
        passed = point.at - points[back].at
        if passed >= 2.0:
            x.append(point.at)
            y.append((point.step - points[back].step) / passed)
    axis = Axis(name="updates per second", from_zero=True)
    line = Series(name="", x=x, y=y, colour="c3")
    return line_chart("Updates per second", [line], FOLLOWED, axis, empty="a moment, please")


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
