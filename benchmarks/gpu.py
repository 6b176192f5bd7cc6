"""Training on one GPU with a ps on the host, beside the plain loops: the mlp of the benchmarks, and a large transformer.

    python benchmarks/gpu.py [--only mlp,gpt,overlap] [--seconds 3] [--no-mps] [--match TEXT] [--output FOLDER]

Where CUDA's MPS can be started, one of its own serves the runs of several workers, so that they use the GPU at the same time;
without it the GPU gives its time to one process after the other.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import results
from results import Floor, Result

from torchquorum.env import child_environment

HERE = Path(__file__).parent
LOOP = HERE / "gpu_loop.py"
CONTROL = "nvidia-cuda-mps-control"
PLACES = "/usr/local/nvidia/bin:/usr/local/cuda/bin"
RUN_S = 240
ASYNC_FLOOR, SYNC_FLOOR, STEP_CEILING = 5000, 2500, 1.3


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Runs an MPS server; yields the variables that make a process use it."""
    control = shutil.which(CONTROL) or shutil.which(CONTROL, path=PLACES)
    if control is None:
        print(f"  there is no {CONTROL} on this machine, so workers take turns at the GPU")
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], env=child_environment(**names), check=True)
        try:
            yield names
        finally:
            subprocess.run([control], input=b"quit\n", env=child_environment(**names), check=False)


def measure(given: dict[str, Any], workers: int, variables: dict[str, str]) -> dict[str, Any]:
    """Runs one loop, alone or as the workers of a run; returns the steps per second of all together."""
    argument = json.dumps(given)
    command = [sys.executable, str(LOOP), argument]
    if given["kind"] == "quorum":
        command = [sys.executable, "-m", "torchquorum.cli.main", "run", "--workers", str(workers), str(LOOP), argument]
    done = subprocess.run(
        command, env=child_environment(**variables), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    found = [json.loads(line) for line in re.findall(r"\{\"steps\".*?\}", done.stdout)]
    if done.returncode or len(found) != workers:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    rate = sum(f["steps"] / f["seconds"] for f in found)
    notes = [line for line in done.stdout.splitlines() if "cannot be captured" in line]
    return {"rate": rate, "captured": found[0]["captured"], "note": notes[0] if notes else ""}


def plan(only: list[str], seconds: float) -> list[tuple[str, dict[str, Any], int]]:
    """Returns what is measured: a name, the loop's arguments, how many workers."""
    mlp = {"model": "mlp", "optimizer": "SGD", "rows": 0, "seconds": seconds, "warm_up": 50, "look_every": 100}
    rows: list[tuple[str, dict[str, Any], int]] = []
    if "mlp" in only:
        rows += [(f"mlp, {kind} loop", {**mlp, "kind": kind}, 1) for kind in ("eager", "captured")]
        for rule in ("async", "sync"):
            for n in (1, 2, 3):
                rows.append((f"mlp, {rule}, {n} worker{'s' * (n > 1)}", {**mlp, "kind": "quorum", "rule": rule}, n))
    if "gpt" in only:
        for optimizer, options in (("SGD", {}), ("AdamW", {"fused": True})):
            for size in (32, 128):
                gpt = {"model": "gpt", "optimizer": optimizer, "options": options, "rows": size, "warm_up": 5}
                gpt |= {"seconds": 2 * seconds, "look_every": 1}
                name = f"transformer, {optimizer}, {size} x 1024 tokens"
                rows.append((f"{name}, eager loop", {**gpt, "kind": "eager"}, 1))
                rows.append((f"{name}, async, 1 worker", {**gpt, "kind": "quorum", "rule": "async"}, 1))
    if "overlap" in only:
        for size in (32, 128):
            gpt = {"model": "gpt", "optimizer": "AdamW", "options": {"fused": True}, "rows": size, "warm_up": 6}
            gpt |= {"seconds": 2 * seconds, "look_every": 1, "kind": "quorum", "rule": "sync", "ordinary": True}
            for when, late in (("after", True), ("during", False)):
                name = f"transformer, AdamW, {size} x 1024 tokens, ordinary loop, gradients leave {when} backward"
                rows.append((name, {**gpt, "late": late}, 1))
    return rows


def measure_all(args: argparse.Namespace) -> Result:
    """Measures all that was asked for."""
    rows: list[dict[str, Any]] = []
    with _nothing() if args.no_mps else mps() as variables:
        for name, given, workers in plan(args.only.split(","), args.seconds):
            if not re.search(args.match, name):
                continue
            found = measure(given, workers, variables if workers > 1 else {})
            rate = found["rate"] / (workers if given.get("rule") == "sync" else 1)
            used = bool(variables) and workers > 1
            rows.append(
                {"name": name, "updates_per_s": round(rate, 1), "ms": round(1000 / rate, 3), "mps": used, **found}
            )
            print(f"  {name:90} {rate:10.1f} updates/s", flush=True)
    named = {row["name"]: row for row in rows}
    floors: list[Floor] = []
    for what, names, bound in (
        ("async", ("mlp, async, 1 worker", "mlp, async, 2 workers", "mlp, async, 3 workers"), ASYNC_FLOOR),
        ("sync of several workers", ("mlp, sync, 2 workers", "mlp, sync, 3 workers"), SYNC_FLOOR),
    ):
        if all(name in named for name in names):
            best = max(names, key=lambda name: named[name]["updates_per_s"])
            floors.append(Floor(f"{what}, best of these ({best})", named[best]["updates_per_s"], bound, " updates/s"))
    for name, row in named.items():
        plain = name.replace("async, 1 worker", "eager loop")
        if "128 x 1024" in name and plain != name and plain in named:
            row["of_plain"] = round(row["ms"] / named[plain]["ms"], 3)
            floors.append(Floor(f"{name}: of the plain step", row["of_plain"], STEP_CEILING, at_most=True))
    device = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    notes = [re.sub(r" \(UUID.*", "", line) for line in device.splitlines()]
    return Result("gpu", (__doc__ or "").splitlines()[0], rows, floors, notes)


def show(result: Result) -> None:
    """Prints the table."""
    head = ["one GPU, one ps on the host", "updates/s", "ms", "MPS"]
    rows = [[r["name"], f"{r['updates_per_s']:,.1f}", f"{r['ms']:.3f}", "yes" if r["mps"] else ""] for r in result.rows]
    print(results.table(head, rows))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--only", default="mlp,gpt")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--match", default="", help="only rows whose name has this, as a regular expression")
    args = parser.parse_args()
    results.report(lambda: measure_all(args), show, args.output)


@contextmanager
def _nothing() -> Iterator[dict[str, str]]:
    yield {}


if __name__ == "__main__":
    main()
