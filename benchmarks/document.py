"""Brings the tables and pictures of docs/speed.md and the README up to date with the newest figures: `make bench-docs`.

    python benchmarks/document.py

Text between `<!-- bench: NAME -->` and `<!-- end of bench -->` is replaced; everything else stays. Pictures go to docs/images/.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pushers
import results

from torchquorum.report.charts import Axis, Series, line_chart
from torchquorum.report.scene import LIGHT, Scene
from torchquorum.report.svg import to_svg

ROOT = Path(__file__).resolve().parent.parent

PAGES = (ROOT / "docs" / "speed.md", ROOT / "README.md")
IMAGES = ROOT / "docs" / "images"
BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end of bench -->)", re.DOTALL)
NAMES = {
    "independent": "two independent trainers",
    "async shm": "async, shared memory",
    "async pipeline shm": "async pipelined, shared memory",
    "sync shm": "sync, shared memory",
    "async tcp": "async, TCP on loopback",
    "sync tcp": "sync, TCP on loopback",
    "ddp gloo": "DDP over gloo",
    "tensorflow async": "TensorFlow's ps, async",
    "tensorflow sync": "TensorFlow's ps, sync",
}
COLOURS = {"shm": "c0", "tcp": "c1"}
WAYS = {"shm": "shared memory", "tcp": "TCP"}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def measured(body: dict[str, Any]) -> str:
    """Returns on what, when and with what a result was measured."""
    m, v = body["machine"], body["versions"]
    busy = f"load {m['load_before'][0]:g} before"
    return (
        f"{body['date'][:10]}, {m['cores']} cores of {m['cpu']}, {m['memory_gib']} GiB, torch {v['torch']}, Python {v['python']}, "
        f"{busy}: `{body['command']}`"
    )


def floors(body: dict[str, Any]) -> str:
    """Returns the floors of a result as a list."""
    lines = []
    for f in body["floors"]:
        bound = f"{'at most' if f['at_most'] else 'at least'} {f['bound']:,g}"
        said = "met" if f["met"] else "**missed**"
        lines.append(f"- {said}: {f['what']} {f['measured']:,.4g}{f['unit']}, {bound}")
    return "\n".join([*lines, *(f"- {note}" for note in body["notes"])])


def _ratio(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def speed(body: dict[str, Any]) -> str:
    """Returns the whole table of speed."""
    head = ["", "batches/s", "spread", "CPU ms per batch", "of independent", "times DDP", "times TensorFlow"]
    rows = [
        [
            NAMES.get(r["name"], r["name"]),
            f"{r['batches_per_s']:.0f}",
            f"{r['low']:.0f} to {r['high']:.0f}",
            f"{r['cpu_ms_per_batch']:.2f}",
            *(_ratio(r[key]) for key in ("of_independent", "times_ddp", "times_tensorflow")),
        ]
        for r in body["rows"]
    ]
    return f"{markdown(head, rows)}\n\n{floors(body)}\n\nMeasured {measured(body)}.\n"


def short(body: dict[str, Any]) -> str:
    """Returns the table of speed for the README, fastest first."""
    rows = sorted(body["rows"], key=lambda r: -r["batches_per_s"])
    cells = [[NAMES.get(r["name"], r["name"]), f"{r['batches_per_s']:.0f}", _ratio(r["of_independent"])] for r in rows]
    m = body["machine"]
    day = f"Medians of {body['date'][:10]} on {m['cores']} cores of {m['cpu']}, with a load of {m['load_before'][0]:g} before it began."
    return f"{markdown(['', 'batches/s', 'of two independent trainers'], cells)}\n\n{day}\n"


def bandwidth(body: dict[str, Any]) -> str:
    """Returns the table of bandwidth."""
    head = ["", "the machine", "pull", "push", "pull, of the machine", "push, of the machine"]
    rows = [
        [
            f"{WAYS[r['transport']]} against {'memcpy' if r['transport'] == 'shm' else 'a raw socket'}",
            *(f"{r[k]:.2f} GB/s" for k in ("machine_gb_per_s", "pull_gb_per_s", "push_gb_per_s")),
            *(f"{r[k]:.2f}" for k in ("pull_of_machine", "push_of_machine")),
        ]
        for r in body["rows"]
    ]
    return f"{markdown(head, rows)}\n\n{floors(body)}\n\nMeasured {measured(body)}.\n"


def load(body: dict[str, Any]) -> str:
    """Returns the table of load."""
    head = ["a gradient of", "workers", "ps", *pushers.HEAD]
    rows = [
        [f"{pushers.size(r['bytes'])}, {WAYS[r['transport']]}", str(r["workers"]), str(r["ps"]), *pushers.cells(r)]
        for r in sorted(body["rows"], key=lambda r: (r["bytes"], r["workers"], r["ps"]))
    ]
    return f"{markdown(head, rows)}\n\n{floors(body)}\n\nMeasured {measured(body)}.\n"


def startup(body: dict[str, Any]) -> str:
    """Returns the table of start-up."""
    rows = [[r["name"], f"{r['seconds']:.2f}", f"{r['low']:.2f} to {r['high']:.2f}"] for r in body["rows"]]
    return f"{markdown(['', 'seconds', 'spread'], rows)}\n\n{floors(body)}\n\nMeasured {measured(body)}.\n"


def memory(body: dict[str, Any]) -> str:
    """Returns the table of memory."""
    head = ["model", "optimizer", "rule", "transport", "workers", "a ps holds", "the formula", "besides"]
    rows = [
        [
            f"{r['mb']:.0f} MB",
            *(str(r[k]) for k in ("optimizer", "rule", "transport", "workers")),
            *(f"{r[k]:,.0f} MB" for k in ("total_mb", "formula_mb", "besides_mb")),
        ]
        for r in body["rows"]
    ]
    return f"{markdown(head, rows)}\n\n{floors(body)}\n\nMeasured {measured(body)}.\n"


def gpu(body: dict[str, Any]) -> str:
    """Returns the table of the GPU."""
    rows = [
        [r["name"], f"{r['updates_per_s']:,.1f}", f"{r['ms']:.3f}", "yes" if r["mps"] else ""] for r in body["rows"]
    ]
    table = markdown(["one GPU, one ps on the host", "updates/s", "ms", "MPS"], rows)
    return f"{table}\n\n{floors(body)}\n\nMeasured {measured(body)}.\n"


def decisions(body: dict[str, Any]) -> str:
    """Returns the table of decisions."""
    rows = [[f"{r['workers']:,}", f"{r['async_us']:.1f}", f"{r['sync_us']:.1f}"] for r in body["rows"]]
    head = ["workers", "Async: CPU microseconds per gradient", "Sync"]
    return f"{markdown(head, rows)}\n\nMeasured {measured(body)}.\n"


def scaling(body: dict[str, Any]) -> str:
    """Returns the figures behind the curves."""
    tables = []
    for curve, key, title in (
        ("workers", "workers", "workers"),
        ("parameters", "bytes", "a gradient of"),
        ("ps", "ps", "ps tasks"),
    ):
        rows = [r for r in body["rows"] if r["curve"] == curve]
        values = sorted({r[key] for r in rows})
        cells = []
        for value in values:
            at = {r["transport"]: r for r in rows if r[key] == value}
            shown = pushers.size(value) if key == "bytes" else str(value)
            cells.append([shown, *(f"{at[w][c]:,.4g}" for w in WAYS for c in ("pushes_per_s", "p50_ms"))])
        head = [title, *(f"{WAYS[w]}: {c}" for w in WAYS for c in ("steps/s", "median step, ms"))]
        tables.append(markdown(head, cells))
    return "\n\n".join([*tables, f"Measured {measured(body)}."]) + "\n"


def draw(body: dict[str, Any]) -> dict[str, Scene]:
    """Returns the pictures of the curves, by file."""
    rows = body["rows"]

    def lines(curve: str, x: Callable[[dict[str, Any]], float], y: Callable[[dict[str, Any]], float]) -> list[Series]:
        found = []
        for way, name in (("shm", "shm"), ("tcp", "TCP")):
            of = sorted((r for r in rows if r["curve"] == curve and r["transport"] == way), key=x)
            found.append(Series(name=name, x=[x(r) for r in of], y=[y(r) for r in of], colour=COLOURS[way], dots=True))
        return found

    def rate(row: dict[str, Any]) -> float:
        return row["pushes_per_s"]

    pause = next(r["pause_ms"] for r in rows if r["curve"] == "workers")
    most = sorted({r["workers"] for r in rows if r["curve"] == "workers"})
    ideal = Series(name="no cost", x=most, y=[n * 1000 / pause for n in most], colour="c6", dash=(4, 3))
    steps = Axis(name="steps per second", kind="log")
    return {
        "speed-workers.svg": line_chart(
            f"Workers with batches of {pause:.0f} ms, 1.59 MB",
            [*lines("workers", lambda r: r["workers"], rate), ideal],
            Axis(name="workers", kind="log"),
            steps,
        ),
        "speed-parameters.svg": line_chart(
            "Size of the model, 2 workers",
            lines("parameters", lambda r: r["bytes"] / 4, rate),
            Axis(name="parameters", kind="log"),
            steps,
        ),
        "speed-ps.svg": line_chart(
            "Ps tasks, 40 MB, 2 workers",
            lines("ps", lambda r: r["ps"], rate),
            Axis(name="ps tasks"),
            Axis(name="steps per second", from_zero=True),
        ),
    }


def standalone(scene: Scene) -> str:
    """Returns a scene as an SVG file of its own, in the light dress."""
    text = to_svg(scene)
    text = re.sub(r' data-axes="[^"]*"', "", text)
    text = re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], text)
    size = f'width="{scene.width:g}" height="{scene.height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" '
    ground = f'<rect {size} fill="{LIGHT["surface"]}"/>'
    first, rest = text.split("\n", 1)
    return f"{first.replace('<svg ', head, 1)}\n{ground}\n{rest}\n"


def main() -> int:
    """Fills the pages and draws; says what is missing."""
    makers = {f.__name__: f for f in (speed, short, bandwidth, load, decisions, startup, memory, scaling, gpu)}
    bodies = {kind: results.newest(kind) for kind in (*results.KINDS, "gpu")}
    bodies["short"] = bodies["speed"]
    missing = [kind for kind, body in bodies.items() if body is None]

    def fill(found: re.Match[str]) -> str:
        body = bodies.get(found[2])
        return found[0] if body is None else f"{found[1]}{makers[found[2]](body)}{found[3]}"

    for page in PAGES:
        page.write_text(BLOCK.sub(fill, page.read_text()))
    if bodies["scaling"] is not None:
        for name, scene in draw(bodies["scaling"]).items():
            (IMAGES / name).write_text(standalone(scene))
    if missing:
        print(f"no figures yet for {', '.join(missing)}: run `make bench` first")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
