"""What slow lines cost, and what helps: a byte-level GPT on four workers, each on a host of its own behind a line.

    python benchmarks/slow_networks.py [--link 20mbit] [--seconds 25] [--only sync,local:30] [--output DIR] [--picture FILE.svg]

Runs examples/gpt/train_slow.py, as root, once for each case and for as long: the loss on held out text against time and against the bytes
that have gone over the chief's line. Five minutes; the machine has to be quiet, for the workers share its cores.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from document import standalone
from results import Result

from torchquorum.report.charts import Axis, Series, line_chart

PROGRAM = Path(__file__).resolve().parent.parent / "examples" / "gpt" / "train_slow.py"
COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
START_S = 120.0


@dataclass(frozen=True)
class Case:
    """One way to train: its name, its rule and compressor, and how many times slower the last worker is."""

    name: str
    rule: str
    compress: str = ""
    slow: float = 1.0


CASES = (
    Case("Sync", "sync"),
    Case("Local(30)", "local:30"),
    Case("int8", "local:30", "int8"),
    Case("int4", "local:30", "int4"),
    Case("top-k, 2 bit", "local:30", "topk:64/4096+2bit"),
    Case("streaming, int4", "local:30/4", "int4"),
    Case("one 4x slower", "local:30", "int4", 4.0),
    Case("one 4x slower, auto", "local:auto30", "int4", 4.0),
)


def run(case: Case, link: str, seconds: float, workers: int, folder: Path) -> dict[str, Any]:
    """Trains one case; returns what the chief has written, with its name."""
    curve = folder / "curve.json"
    command = [sys.executable, "-m", "torchquorum", "run", f"--workers={workers}", f"--link={link}", str(PROGRAM)]
    command += [f"--rule={case.rule}", f"--seconds={seconds}", f"--slow={case.slow}", f"--curve={curve}"]
    command += [f"--compress={case.compress}"] if case.compress else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + START_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    steps = [
        int(line.split(": ")[1].split()[0])
        for line in done.stdout.splitlines()
        if " steps in " in line and "worker " in line and "loss" not in line
    ]
    body = json.loads(curve.read_text())
    return {"name": case.name, **body, "all_steps": body["steps"] + sum(steps)}


def measure(cases: list[Case], link: str, seconds: float, workers: int) -> Result:
    """Trains every case for as long."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            row = run(case, link, seconds, workers, Path(folder))
            print(f"{case.name}: loss {row['loss']:.3f} after {row['steps']} steps", flush=True)
            rows.append(row)
    what = f"a GPT of 0.3 million parameters, {workers} workers behind {link} each way, {seconds:g} s"
    return Result("slow-networks", what, rows)


def cells(row: dict[str, Any]) -> list[str]:
    """Returns a row of the table."""
    last = row["curve"][-1] if row["curve"] else {"sent": 0, "received": 0, "step": 1}
    per_step = [f"{last[way] / max(1, last['step']) / 1e3:,.1f}" for way in ("sent", "received")]
    return [
        row["name"],
        f"`{row['rule']}`",
        row["compress"] or "-",
        f"{row['loss']:.3f}",
        str(row["steps"]),
        str(row["all_steps"]),
        *per_step,
    ]


HEAD = ["", "rule", "compress", "loss", "steps of the chief", "steps of all", "kB up a step", "kB down a step"]


def show(result: Result) -> None:
    """Prints the table."""
    print(results.table(HEAD, [cells(row) for row in result.rows]))
    results.say(result)


def picture(body: dict[str, Any]) -> str:
    """Returns the loss against time, and below it against bytes."""
    scenes = []
    for title, x, value in (
        ("Loss on held out text against time", Axis(name="seconds", from_zero=True), lambda p: p["s"]),
        (
            "and against bytes",
            Axis(name="MB over the chief's line", kind="log"),
            lambda p: (p["sent"] + p["received"]) / 1e6,
        ),
    ):
        lines = [
            Series(
                name=row["name"], x=[value(p) for p in row["curve"]], y=[p["loss"] for p in row["curve"]], colour=colour
            )
            for row, colour in zip(body["rows"], COLOURS, strict=False)
            if len(row["curve"]) > 1
        ]
        scenes.append(line_chart(title, lines, x, Axis(name="loss")))
    height = sum(scene.height for scene in scenes)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{scenes[0].width:g}" height="{height:g}">']
    at = 0.0
    for scene in scenes:
        parts.append(standalone(scene).replace("<svg ", f'<svg y="{at:g}" ', 1).rstrip())
        at += scene.height
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Measures, prints a table, and writes JSON and the picture."""
    parser = results.parser(__doc__)
    parser.add_argument("--link", default="20mbit")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", default="", help="comma-separated names of cases")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    names = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := set(names) - {case.name for case in CASES}:
        parser.error(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(case.name for case in CASES)}")
    cases = [case for case in CASES if not names or case.name in names]
    before = results.machine()
    result = measure(cases, args.link, args.seconds, args.workers)
    show(result)
    if args.output:
        print(results.keep(result, args.output, before))
    if args.picture:
        args.picture.write_text(picture({"rows": result.rows}))


if __name__ == "__main__":
    main()
