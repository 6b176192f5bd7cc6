"""What the wire and the journal cost: TCP with and without a secret, and durable runs, each beside what it is a share of.

    python benchmarks/wire.py [--seconds 2.5] [--rounds 3] [--only "async tcp,async durable write"]

One ps and two workers, MNIST, mlp 784-500-10, SGD. Durable runs write their journal to a folder of the disk on which `--folder` is.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import results
from results import Floor, Result
from speed import DDP, INDEPENDENT, FailedError, Options, Sample, ddp, independent, quorum

from torchquorum.cluster.secret import make_secret

# Of what each is a share, and the floor of that share.
WANTED = {
    "async tcp": (INDEPENDENT, 0.62),
    "sync tcp": (INDEPENDENT, 0.56),
    "async tls": ("async tcp", 0.6),
    "sync tls": ("sync tcp", 0.6),
    "async durable write": ("async folder", 0.75),
    "async durable fsync": ("async folder", 0.6),
    "sync durable write": ("sync folder", 0.75),
    "sync durable fsync": ("sync folder", 0.6),
}
TIMES_DDP = 1.3


def measures(o: Options, folder: Path | None) -> dict[str, Callable[[], Sample]]:
    """Returns what is measured, by name."""
    locked = replace(o, environment={"TORCHQUORUM_SECRET": make_secret()})

    def in_folder(rule: str, durable: str) -> Sample:
        with tempfile.TemporaryDirectory(dir=folder, prefix="wire-") as logdir:
            return quorum(rule, "shm", replace(o, logdir=logdir, durable=durable))

    found: dict[str, Callable[[], Sample]] = {INDEPENDENT: lambda: independent(o), DDP: lambda: ddp(o)}
    for rule in ("async", "sync"):
        found[f"{rule} tcp"] = lambda rule=rule: quorum(rule, "tcp", o)
        found[f"{rule} tls"] = lambda rule=rule: quorum(rule, "tcp", locked)
        found[f"{rule} folder"] = lambda rule=rule: in_folder(rule, "")
        for mode in ("write", "fsync"):
            found[f"{rule} durable {mode}"] = lambda rule=rule, mode=mode: in_folder(rule, mode)
    return found


def measure(o: Options, rounds: int, only: Sequence[str] = (), folder: Path | None = None) -> Result:
    """Measures everything in turns, round after round."""
    needed = {*only, *(WANTED[name][0] for name in only if name in WANTED)}
    chosen = {name: m for name, m in measures(o, folder).items() if not only or name in needed}
    seen: dict[str, list[Sample]] = {name: [] for name in chosen}
    notes = list[str]()
    for number in range(rounds):
        for name in list(chosen):
            try:
                seen[name].append(chosen[name]())
            except FailedError as error:
                notes.append(f"{name} failed: {str(error).splitlines()[0]}")
                del chosen[name]
                continue
            print(f"  round {number + 1}  {name:22} {seen[name][-1].rate:8.1f} batches/s", flush=True)
    rows = rows_of({name: samples for name, samples in seen.items() if samples})
    return Result("wire", "1 ps, 2 workers: MNIST, mlp 784-500-10, batch 100, SGD 0.01", rows, floors_of(rows), notes)


def rows_of(seen: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Returns medians, spreads and shares."""
    medians = {name: statistics.median(s.rate for s in samples) for name, samples in seen.items()}
    return [
        {
            "name": name,
            "batches_per_s": round(medians[name], 1),
            "low": round(min(s.rate for s in samples), 1),
            "high": round(max(s.rate for s in samples), 1),
            "cpu_ms_per_batch": results.middle(s.cpu_ms for s in samples),
            "of": WANTED[name][0] if name in WANTED else None,
            "share": round(medians[name] / medians[WANTED[name][0]], 3)
            if name in WANTED and WANTED[name][0] in medians
            else None,
            "times_ddp": round(medians[name] / medians[DDP], 3) if DDP in medians else None,
        }
        for name, samples in seen.items()
    ]


def floors_of(rows: Sequence[dict[str, Any]]) -> list[Floor]:
    """Returns the floors of what was measured."""
    floors = [
        Floor(row["name"], row["share"], WANTED[row["name"]][1], f" of {row['of']}") for row in rows if row["share"]
    ]
    plain = [row for row in rows if row["name"].endswith(" tcp") and row["times_ddp"]]
    return floors + [Floor(row["name"], row["times_ddp"], TIMES_DDP, " x DDP") for row in plain]


def show(result: Result) -> None:
    """Prints the table."""
    head = ["", "batches/s", "spread", "CPU ms/batch", "share", "of", "x DDP"]
    rows = [
        [
            row["name"],
            f"{row['batches_per_s']:.1f}",
            f"{row['low']:.1f} .. {row['high']:.1f}",
            f"{row['cpu_ms_per_batch']:.2f}",
            f"{row['share']:.2f}" if row["share"] else "-",
            row["of"] or "-",
            f"{row['times_ddp']:.2f}" if row["times_ddp"] else "-",
        ]
        for row in result.rows
    ]
    print(results.table(head, rows))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser: argparse.ArgumentParser = results.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=200, help="batches of each worker before the clock starts")
    parser.add_argument(
        "--folder", type=Path, help="a folder of the disk for journals; by default that of temporary files"
    )
    parser.add_argument("--only", default="", help="comma-separated names to measure, beside what they are a share of")
    args = parser.parse_args()
    options = Options(args.seconds, args.warm_up, None)
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := set(only) - set(measures(options, None)):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(measures(options, None))}")
    results.report(lambda: measure(options, args.rounds, only, args.folder), show, args.output)


if __name__ == "__main__":
    main()
