"""What a step of each optimizer costs on the fast path: a column for each, beside independent trainers and DDP with the same one.

    python benchmarks/optimizers.py [--seconds 2.5] [--rounds 3] [--only sgd,adam]

One ps and two workers in shared memory; MNIST, mlp 784-500-10.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import results
from results import Floor, Result
from speed import DDP, INDEPENDENT, FailedError, Options, Sample, ddp, independent, quorum
from work import OPTIMIZERS

WAYS = {
    INDEPENDENT: independent,
    "async shm": lambda o: quorum("async", "shm", o),
    "sync shm": lambda o: quorum("sync", "shm", o),
    DDP: ddp,
}
FLOORS = {"async shm": 0.80, "sync shm": 0.75}
FLOORS_SGD = {"async shm": 0.83, "sync shm": 0.76}
TIMES_DDP = 1.3


def measure(o: Options, rounds: int, only: Sequence[str] = ()) -> Result:
    """Measures everything in turns, round after round."""
    names = [name for name in OPTIMIZERS if not only or name in only]
    seen: dict[tuple[str, str], list[Sample]] = {(way, name): [] for name in names for way in WAYS}
    notes = list[str]()
    for number in range(rounds):
        for way, name in list(seen):
            try:
                found = WAYS[way](replace(o, optimizer=name))
            except FailedError as error:
                notes.append(f"{way} with {name} failed: {str(error).splitlines()[0]}")
                del seen[way, name]
                continue
            seen[way, name].append(found)
            print(f"  round {number + 1}  {name:10} {way:12} {found.rate:8.1f} batches/s", flush=True)
    medians = {key: statistics.median(s.rate for s in samples) for key, samples in seen.items() if samples}
    rows = [_row(way, names, medians, seen) for way in WAYS]
    what = "1 ps, 2 workers, shared memory: MNIST, mlp 784-500-10 (1.59 MB), batch 100, L2 1e-4, one thread a process"
    return Result("optimizers", what, rows, floors_of(rows), notes)


def _row(
    way: str, names: Sequence[str], medians: dict[tuple[str, str], float], seen: dict[tuple[str, str], list[Sample]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": way}
    for name in names:
        rate, alone, peer = (medians.get((each, name)) for each in (way, INDEPENDENT, DDP))
        if rate is not None:
            row[name] = {
                "batches_per_s": round(rate, 1),
                "cpu_ms_per_batch": results.middle(s.cpu_ms for s in seen[way, name]),
                "of_independent": round(rate / alone, 3) if alone else None,
                "times_ddp": round(rate / peer, 3) if peer else None,
            }
    return row


def floors_of(rows: Sequence[dict[str, Any]]) -> list[Floor]:
    """Returns the floors of what was measured."""
    found = list[Floor]()
    for row in rows:
        if row["name"] not in FLOORS:
            continue
        for name in [key for key in row if key != "name"]:
            bound = (FLOORS_SGD if name == "sgd" else FLOORS)[row["name"]]
            if (share := row[name]["of_independent"]) is not None:
                found.append(Floor(f"{row['name']} {name}", share, bound, " of independent"))
            if (times := row[name]["times_ddp"]) is not None:
                found.append(Floor(f"{row['name']} {name}", times, TIMES_DDP, " x DDP"))
    return found


def show(result: Result) -> None:
    """Prints the table: batches per second, and the share of independent trainers with that optimizer."""
    names = [key for key in result.rows[0] if key != "name"]
    cells = [[row["name"], *(_cell(row[name]) if name in row else "-" for name in names)] for row in result.rows]
    print(results.table(["", *names], cells))
    results.say(result)


def _cell(of: dict[str, Any]) -> str:
    share = f" ({of['of_independent']:.2f})" if of["of_independent"] else ""
    return f"{of['batches_per_s']:.0f}{share}"


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=200, help="batches of each worker before the clock starts")
    parser.add_argument("--only", default="", help=f"comma-separated optimizers: {', '.join(OPTIMIZERS)}")
    args = parser.parse_args()
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := set(only) - set(OPTIMIZERS):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(OPTIMIZERS)}")
    options = Options(args.seconds, args.warm_up, None)
    results.report(lambda: measure(options, args.rounds, only), show, args.output)


if __name__ == "__main__":
    main()
