"""How long it takes until something happens: `torchquorum --help`, and the first training step of `torchquorum train`.

    python benchmarks/startup.py [--rounds 3] [--output DIR]

The first step is read in the ledger: when the first gradient arrived, less when the command was started. Importing torch,
which every task does, is measured beside it.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results
from results import Floor, Result

TORCHQUORUM = [sys.executable, "-m", "torchquorum.cli.main"]
HELP_S, FIRST_STEP_S = 0.3, 6.0


def seconds_of(command: list[str]) -> float:
    """Returns how long a command takes."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def first_step_s(*options: str) -> float:
    """Returns the seconds from the start of `torchquorum train` to its first gradient."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        command = [*TORCHQUORUM, "train", "--steps", "5", "--logdir", f"{folder}/run", "--quiet", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "ledger.jsonl").read_text().splitlines()]
    return min(line["arrived_at"] for line in lines if "arrived_at" in line) - began


def measure(rounds: int) -> Result:
    """Measures everything in turns."""
    actions = {
        "python": lambda: seconds_of([sys.executable, "-c", "pass"]),
        "torchquorum --help": lambda: seconds_of([*TORCHQUORUM, "--help"]),
        "import torch": lambda: seconds_of([sys.executable, "-c", "import torch"]),
        "first step of torchquorum train": first_step_s,
        "first step with --transport tcp": lambda: first_step_s("--transport", "tcp"),
    }
    seen: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            seen[name].append(action())
    rows: list[dict[str, Any]] = [
        {"name": name, "seconds": results.middle(v, 3), "low": round(min(v), 3), "high": round(max(v), 3)}
        for name, v in seen.items()
    ]
    by_name = {row["name"]: row["seconds"] for row in rows}
    floors = [
        Floor("torchquorum --help", by_name["torchquorum --help"], HELP_S, " s", at_most=True),
        Floor("first step", by_name["first step of torchquorum train"], FIRST_STEP_S, " s", at_most=True),
    ]
    return Result("startup", "seconds from the command to the first sign of it", rows, floors)


def show(result: Result) -> None:
    """Prints the table."""
    head = ["", "seconds", "spread"]
    rows = [[row["name"], f"{row['seconds']:.2f}", f"{row['low']:.2f} .. {row['high']:.2f}"] for row in result.rows]
    print(results.table(head, rows))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    results.report(lambda: measure(args.rounds), show, args.output)


if __name__ == "__main__":
    main()
