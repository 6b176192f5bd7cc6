"""Training on one GPU with a ps on the host, beside the plain loops: the mlp of the benchmarks, and a large transformer.

    python benchmarks/gpu.py [--only mlp,gpt] [--seconds 3] [--mps] [--json FILE]

With `--mps` a CUDA MPS server of its own serves the runs, so that several workers can use the GPU at the same time; without
one the GPU gives its time to one process after the other. Prints a table and writes the figures as JSON.
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

from torchquorum.env import child_environment

HERE = Path(__file__).parent
LOOP = HERE / "gpu_loop.py"
CONTROL = "nvidia-cuda-mps-control"
PLACES = "/usr/local/nvidia/bin:/usr/local/cuda/bin"
RUN_S = 240


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Runs an MPS server; yields the variables that make a process use it."""
    control = shutil.which(CONTROL) or shutil.which(CONTROL, path=PLACES)
    if control is None:
        sys.exit(f"--mps: there is no {CONTROL} on this machine; leave it out, or install CUDA's tools")
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
        rows += [(f"mlp, async, {n} workers", {**mlp, "kind": "quorum", "rule": "async"}, n) for n in (1, 2, 3)]
        rows += [(f"mlp, sync, {n} workers", {**mlp, "kind": "quorum", "rule": "sync"}, n) for n in (1, 2, 3)]
    if "gpt" in only:
        for optimizer, options in (("SGD", {}), ("AdamW", {"fused": True})):
            for size in (32, 128):
                gpt = {"model": "gpt", "optimizer": optimizer, "options": options, "rows": size, "warm_up": 5}
                gpt |= {"seconds": 2 * seconds, "look_every": 1}
                name = f"transformer, {optimizer}, {size} x 1024 tokens"
                rows.append((f"{name}, eager loop", {**gpt, "kind": "eager"}, 1))
                rows.append((f"{name}, async, 1 worker", {**gpt, "kind": "quorum", "rule": "async"}, 1))
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="mlp,gpt")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--match", default="", help="only rows whose name has this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with mps() if args.mps else _nothing() as variables:
        for name, given, workers in plan(args.only.split(","), args.seconds):
            if args.match and not re.search(args.match, name):
                continue
            found = measure(given, workers, variables)
            rate = found["rate"] / (workers if given.get("rule") == "sync" else 1)
            figures[name] = {**found, "updates_per_s": rate, "ms": 1000 / rate, "mps": args.mps}
            print(f"{name:50} {rate:10.1f} updates/s {1000 / rate:9.3f} ms  {found['note']}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


@contextmanager
def _nothing() -> Iterator[dict[str, str]]:
    yield {}


if __name__ == "__main__":
    main()
