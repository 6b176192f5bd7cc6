"""Batches per second of torchquorum beside its limit and its peer, interleaved, in one run.

    python benchmarks/speed.py [--seconds 6] [--rounds 3]

`independent` is the limit: two trainers that share nothing. Ratios of medians mean something, single figures do not.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent


def rates(commands: list[list[str]], expected: int) -> float:
    """Runs the commands together and returns the sum of the rates that they print."""
    tasks = [subprocess.Popen(c, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        printed = [task.communicate(timeout=300) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    found = [float(r) for out, _ in printed for r in re.findall(r"rate (\d+\.\d+)", out)]
    if len(found) != expected:
        raise SystemExit(
            f"{' '.join(commands[0])}: {len(found)} of {expected} rates\n" + "\n".join(o + e for o, e in printed)
        )
    return sum(found)


def measures(seconds: float) -> dict[str, Callable[[], float]]:
    """Returns what is measured, by name."""
    python, length = sys.executable, str(seconds)

    def quorum(rule: str, transport: str) -> float:
        command = [python, "-m", "torchquorum.cli.main", "run", "--transport", transport]
        return rates([[*command, "quorum_loop.py", rule, length]], 2)

    ddp = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "torch_loop.py",
        "ddp",
        length,
    ]
    return {
        "independent": lambda: rates([[python, "torch_loop.py", "alone", length]] * 2, 2),
        "async shm": lambda: quorum("async", "shm"),
        "sync shm": lambda: quorum("sync", "shm"),
        "async pipeline shm": lambda: quorum("async:pipeline", "shm"),
        "async tcp": lambda: quorum("async", "tcp"),
        "sync tcp": lambda: quorum("sync", "tcp"),
        "ddp gloo": lambda: rates([ddp], 2),
    }


def main() -> None:
    """Measures and prints a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="comma-separated names to measure, beside independent")
    args = parser.parse_args()
    chosen = measures(args.seconds)
    if args.only:
        chosen = {k: v for k, v in chosen.items() if k == "independent" or k in args.only.split(",")}
    seen: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(args.rounds):
        for name, measure in chosen.items():
            seen[name].append(measure())
    limit = statistics.median(seen["independent"])
    for name, values in seen.items():
        middle = statistics.median(values)
        print(
            f"{name:20} {middle:7.1f} batches/s   {min(values):7.1f} .. {max(values):7.1f}   {middle / limit:.2f} of independent"
        )
    print(json.dumps({name: round(statistics.median(values), 1) for name, values in seen.items()}))


if __name__ == "__main__":
    main()
