"""Everything that is measured, one part after the other: `make bench`.

    python benchmarks/bench.py [--only speed,optimizers,wire,bandwidth,load,scaling,decisions,startup,memory,rows,reader]
                               [--tensorflow PYTHON] [--quick]

Prints a table for each part and which floors it met, and writes a JSON file for each into benchmarks/results/. Takes about
fifteen minutes on a machine that has nothing else to do. `make bench-docs` then brings docs/speed.md and its pictures up to date.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import bandwidth
import decisions
import load
import memory
import optimizers
import reader
import results
import rows
import scaling
import speed
import startup
import wire
from results import KINDS, Floor, Result

Part = tuple[Callable[[], Result], Callable[[Result], None]]


def parts(args: argparse.Namespace) -> dict[str, Part]:
    """Returns what is measured, and how it is shown, by name."""
    seconds, rounds = (0.2, 1) if args.quick else (args.seconds, args.rounds)
    short = 0.2 if args.quick else min(1.0, args.seconds)
    options = speed.Options(seconds, 20 if args.quick else 200, args.tensorflow or None)
    numel = 1_000_000 if args.quick else bandwidth.NUMEL
    workers = (2, 4) if args.quick else (2, 4, 8, 16, 32)
    only = [name.strip() for name in args.speed_only.split(",") if name.strip()]
    return {
        "speed": (lambda: speed.measure(options, rounds, only), speed.show),
        "optimizers": (lambda: optimizers.measure(options, rounds), optimizers.show),
        "wire": (lambda: wire.measure(options, rounds), wire.show),
        "bandwidth": (lambda: bandwidth.measure(numel, 3 * rounds), bandwidth.show),
        "load": (lambda: load.measure(short, workers, huge=numel, rounds=rounds), load.show),
        "scaling": (lambda: scaling.measure(short), scaling.show),
        "decisions": (lambda: decisions.measure(rounds), decisions.show),
        "startup": (lambda: startup.measure(rounds), startup.show),
        "rows": (
            lambda: rows.measure(
                1.0 if args.quick else 6.0,
                rounds,
                args.fbgemm,
                rows.SIZES[:2] if args.quick else rows.SIZES,
                args.tensorflow or None,
            ),
            rows.show,
        ),
        "reader": (
            lambda: reader.measure(seconds if args.quick else 6.0, rounds, 20 if args.quick else 200),
            reader.show,
        ),
        "memory": (lambda: memory.measure(memory.CASES[:1] if args.quick else memory.CASES), memory.show),
    }


def main() -> int:
    """Measures what was asked for; 1 if a part could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default=",".join((*KINDS, "optimizers", "wire", "rows")), help="comma-separated parts"
    )
    parser.add_argument("--seconds", type=float, default=2.5, help="of one measurement of speed")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns")
    parser.add_argument("--speed-only", default="", help="comma-separated rows of the table of speed")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter that has tensorflow; make: TF_PYTHON")
    parser.add_argument("--fbgemm", default="", metavar="FOLDER", help="where fbgemm-gpu-cpu is, for the limit of rows")
    parser.add_argument(
        "--quick", action="store_true", help="only see whether everything runs; the figures mean nothing"
    )
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="the folder for the JSON")
    args = parser.parse_args()
    chosen = parts(args)
    names = [name.strip() for name in args.only.split(",")]
    if unknown := set(names) - set(chosen):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(chosen)}")
    began, floors, failed = time.monotonic(), list[Floor](), []
    for name in names:
        measure, show = chosen[name]
        before = results.machine()
        print(f"== {name}, load of the machine {before['load_before'][0]}", flush=True)
        try:
            result = measure()
        except (Exception, SystemExit):
            traceback.print_exc()
            failed.append(name)
            continue
        show(result)
        floors += result.floors
        results.keep(result, args.output, before)
    met = sum(floor.met for floor in floors)
    print(f"{met} of {len(floors)} floors met, in {time.monotonic() - began:.0f} s; figures in {args.output}")
    if failed:
        print(f"not measured: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
