"""Batches per second of a run beside readers, and without: in turns.

    python benchmarks/reader.py [--seconds 6] [--rounds 5]

8 processes with a `tq.Reader` each take 10 versions a second of a run of two workers on one host, from shared memory; `messages` is the
same by message. How old what they have is, and bytes beside what has changed, are those of the readers themselves.
"""

import json
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import results
from results import Floor, Result
from speed import FailedError, sample

HERE = Path(__file__).resolve().parent
READERS, EVERY_S = 8, 0.1
LEAST_SHARE, MOST_BYTES = 0.95, 1.1


def _ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("localhost", 0))
    found = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return found


def once(way: str, seconds: float, warm_up: int) -> dict[str, float]:
    """Measures a run with readers that read in this way; `none` for no readers."""
    ports = _ports(3)
    names = [f"localhost:{port}" for port in ports]
    flags = [f"--ps_hosts={names[0]}", f"--worker_hosts={names[1]},{names[2]}"]
    loop = [sys.executable, "quorum_loop.py", "async", str(seconds), str(warm_up)]
    tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
    commands = [[*loop, f"--job_name={job}", f"--task_index={index}", *flags] for job, index in tasks]
    count = 0 if way == "none" else READERS
    command = [sys.executable, "reader_loop.py", names[0], way, str(EVERY_S)]
    readers = [subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for reader in readers:
            assert reader.stdout is not None
            if reader.stdout.readline().strip() != "ready":
                raise FailedError("a reader did not begin")
        found = sample(commands, 2, reporting=[1, 2])
        said = [json.loads(reader.communicate(timeout=60)[0].splitlines()[-1]) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    row: dict[str, float] = {"batches_per_s": found.rate, "cpu_ms_per_batch": found.cpu_ms}
    for name in said[0] if said else ():
        row[name] = statistics.median(each[name] for each in said)
    return row


def measure(seconds: float, rounds: int, warm_up: int = 200) -> Result:
    """Measures in turns: without readers, with, and with readers that read by message."""
    ways = ("none", "shared", "messages")
    every = [{way: once(way, seconds, warm_up) for way in ways} for _ in range(rounds)]
    rows: list[dict[str, Any]] = []
    for way in ways:
        names = every[0][way]
        row: dict[str, Any] = {"readers": way}
        row |= {name: results.middle((each[way][name] for each in every), 4) for name in names}
        row["share"] = results.middle((e[way]["batches_per_s"] / e["none"]["batches_per_s"] for e in every), 4)
        rows.append(row)
    floors = [
        Floor("batches/s beside 8 readers, of those without", rows[1]["share"], LEAST_SHARE),
        Floor("bytes by message, of what changed", rows[2]["bytes_of_changed"], MOST_BYTES, at_most=True),
    ]
    what = f"1 ps, 2 workers, async, {READERS} readers at {1 / EVERY_S:.0f} versions a second each, one host"
    return Result("reader", what, rows, floors)


def show(result: Result) -> None:
    """Prints the table."""
    head = [
        "readers",
        "batches/s",
        "of those without",
        "versions/s each",
        "age p50, s",
        "age p99, s",
        "bytes of changed",
    ]
    rows = [
        [
            str(r["readers"]),
            f"{r['batches_per_s']:.0f}",
            f"{r['share']:.3f}",
            *(
                f"{r[name]:.2f}" if name in r else ""
                for name in ("versions_per_s", "age_p50_s", "age_p99_s", "bytes_of_changed")
            ),
        ]
        for r in result.rows
    ]
    print(results.table(head, rows))
    results.say(result)


def main() -> None:
    """Measures, prints the table and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results.report(lambda: measure(args.seconds, args.rounds), show, args.output)


if __name__ == "__main__":
    main()
