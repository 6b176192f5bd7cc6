"""One ps under load: pushes per second of ready-made gradients, from 2 to 32 workers, and how long a step takes.

    python benchmarks/load.py [--seconds 1.0] [--rounds 2] [--workers 2,4,8,16,32] [--output DIR]

Rule Async over shared memory; a step is a push, its update and a pull. Clusters of all sizes are up at the same time and push in
turns, half a second each. Beside it two ps tasks against one, over TCP, with 100 MB, where the bytes are the work.
"""

import operator
import os
from collections.abc import Sequence
from typing import Any

import pushers
import results
from pushers import Push
from results import Floor, Result

LARGE, SMALL, HUGE = 397_510, 1_024, 25_000_000  # numbers in a gradient: the mlp's 1.59 MB, 4 KB, 100 MB
LEAST = {LARGE: 1_500, SMALL: 8_000}
NOT_FALLING = 0.9
CORES_FOR_TWO_PS = 4


def measure(seconds: float, workers: Sequence[int], *, huge: int = HUGE, rounds: int = 2) -> Result:
    """Measures both sizes with every number of workers, in turns, then one ps task against two."""
    rows = []
    for numel in (LARGE, SMALL):
        rows += pushers.run_in_turns([Push(numel, number, seconds=seconds * rounds) for number in workers])
    for row in rows:
        _say(row)
    seen: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for _ in range(rounds):
        for ps, found in seen.items():
            found.append(pushers.run(Push(huge, 2, ps=ps, transport="tcp", seconds=seconds)))
            _say(found[-1])
    pair = [pushers.median_of(found) for found in seen.values()]
    return Result("load", __doc__.splitlines()[0], rows + pair, *_judge(rows, pair, workers))


def _judge(
    rows: list[dict[str, Any]], pair: list[dict[str, Any]], workers: Sequence[int]
) -> tuple[list[Floor], list[str]]:
    floors = []
    for numel, least in LEAST.items():
        of = {row["workers"]: row for row in rows if row["bytes"] == 4 * numel}
        name, first = pushers.size(4 * numel), of.pop(workers[0])
        floors.append(Floor(f"{name}, {workers[0]} workers", first["pushes_per_s"], least, " pushes/s"))
        shares = {n: results.middle(map(operator.truediv, row["turns"], first["turns"])) for n, row in of.items()}
        if shares:
            worst = min(shares, key=lambda n: shares[n])
            what = f"{name}, slowest ({worst} workers) of {workers[0]} to {workers[-1]}"
            floors.append(Floor(what, round(shares[worst], 3), NOT_FALLING, f" of {workers[0]} workers"))
    one, two = (row["pushes_per_s"] for row in pair)
    if (os.cpu_count() or 1) >= CORES_FOR_TWO_PS:
        return [*floors, Floor("100 MB over TCP, two ps tasks", round(two / one, 3), 1.0, " x one ps")], []
    note = f"100 MB over TCP: two ps tasks make {two / one:.2f} of the steps of one; they need {CORES_FOR_TWO_PS} cores"
    return floors, [note]


def _say(row: dict[str, Any]) -> None:
    who = f"{row['workers']} workers, {row['ps']} ps, {row['transport']}"
    print(f"  {pushers.size(row['bytes']):>8}  {who:22} {row['pushes_per_s']:9,.0f} pushes/s", flush=True)


def show(result: Result) -> None:
    """Prints the table."""
    head = ["", "workers", "ps", *pushers.HEAD]
    rows = [
        [
            f"{pushers.size(row['bytes'])} {row['transport']}",
            str(row["workers"]),
            str(row["ps"]),
            *pushers.cells(row),
        ]
        for row in sorted(result.rows, key=lambda row: (row["bytes"], row["workers"], row["ps"]))
    ]
    print(results.table(head, rows))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", default="2,4,8,16,32")
    args = parser.parse_args()
    results.report(
        lambda: measure(args.seconds, [int(n) for n in args.workers.split(",")], rounds=args.rounds), show, args.output
    )


if __name__ == "__main__":
    main()
