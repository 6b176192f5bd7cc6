"""Steps per second as work grows: against workers, against parameters, against ps tasks.

    python benchmarks/scaling.py [--seconds 1.0] [--only workers,parameters,ps] [--output DIR]

Workers push ready-made gradients (pushers.py), rule Async. Against workers each pauses 20 ms before a push, as if a GPU
computed its batch: then every worker adds 50 steps per second until something is full, on few cores too.
"""

from collections.abc import Sequence
from typing import Any

import pushers
import results
from pushers import Push
from results import Result

MLP = 397_510
PAUSE_S = 0.02
WORKERS = (1, 2, 4, 8, 16, 32)
PARAMETERS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 25_000_000)
PS = (1, 2, 4)
PS_NUMEL = 10_000_000
CURVES = ("workers", "parameters", "ps")


def points(curve: str, seconds: float) -> list[Push]:
    """Returns what is measured for one curve, over both transports."""
    ways = ("shm", "tcp")
    if curve == "workers":
        return [Push(MLP, n, transport=way, seconds=seconds, pause_s=PAUSE_S) for n in WORKERS for way in ways]
    if curve == "parameters":
        return [Push(numel, 2, transport=way, seconds=seconds) for numel in PARAMETERS for way in ways]
    return [Push(PS_NUMEL, 2, ps=n, transport=way, seconds=seconds) for n in PS for way in ways]


def measure(seconds: float, curves: Sequence[str] = CURVES) -> Result:
    """Measures every point of every curve."""
    rows: list[dict[str, Any]] = []
    for curve in curves:
        for push in points(curve, seconds):
            row = {"curve": curve, "pause_ms": 1000 * push.pause_s, **pushers.run(push)}
            rows.append(row)
            where = f"{pushers.size(row['bytes'])}, {row['workers']} workers, {row['ps']} ps, {row['transport']}"
            print(f"  {curve:10} {where:34} {row['pushes_per_s']:9,.1f} steps/s", flush=True)
    return Result("scaling", __doc__.splitlines()[0], rows)


def show(result: Result) -> None:
    """Prints the table."""
    head = ["", "size", "workers", "ps", *pushers.HEAD]
    rows = [
        [
            f"{row['curve']}, {row['transport']}",
            pushers.size(row["bytes"]),
            str(row["workers"]),
            str(row["ps"]),
            *pushers.cells(row),
        ]
        for row in sorted(result.rows, key=lambda row: (row["curve"], row["transport"]))
    ]
    print(results.table(head, rows))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", default=",".join(CURVES))
    args = parser.parse_args()
    results.report(lambda: measure(args.seconds, args.only.split(",")), show, args.output)


if __name__ == "__main__":
    main()
