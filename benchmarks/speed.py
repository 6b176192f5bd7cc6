"""Batches per second of torchquorum beside its limit and its peers, interleaved and repeated.

    python benchmarks/speed.py [--seconds 3] [--rounds 3] [--tensorflow PYTHON] [--only "async shm,sync shm"]

`independent` is the limit: two trainers that share nothing. Ratios of medians within one run mean something, single figures
do not. CPU milliseconds per batch count all processes of a cluster, user and system, while the clock runs; on a busy
machine they are steadier than rates.
"""

import re
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import results
from results import Floor, Result

HERE = Path(__file__).resolve().parent
INDEPENDENT, DDP, TF_ASYNC, TF_SYNC = "independent", "ddp gloo", "tensorflow async", "tensorflow sync"
DEADLINE_S = 300.0


class FailedError(Exception):
    """A program that was measured did not report."""


@dataclass(frozen=True)
class Sample:
    """One measurement of a whole cluster."""

    rate: float
    cpu_ms: float


@dataclass(frozen=True)
class Options:
    """How long, and on what: passed to every loop.

    `environment` has further variables of a cluster's tasks; `logdir` is its folder, which it needs to be `durable`.
    """

    seconds: float
    warm_up: int
    tensorflow: str | None
    optimizer: str = "sgd"
    logdir: str = ""
    durable: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def sample(commands: list[list[str]], expected: int, *, reporting: Sequence[int]) -> Sample:
    """Runs commands together; waits for those at the positions `reporting`, ends the rest, and reads what they say."""
    with tempfile.TemporaryFile("w+") as errors:
        tasks = [subprocess.Popen(c, cwd=HERE, stdout=subprocess.PIPE, stderr=errors, text=True) for c in commands]
        try:
            said = "".join(tasks[i].communicate(timeout=DEADLINE_S)[0] for i in reporting)
        except subprocess.TimeoutExpired:
            said = f"nothing after {DEADLINE_S:.0f} s"
        finally:
            for task in tasks:
                task.kill()
                task.communicate()
        found = [(float(r), float(c)) for r, c in re.findall(r"rate (\d+\.\d+) cpu (\d+\.\d+)", said)]
        if len(found) != expected:
            errors.seek(0)
            last = (said + errors.read()).strip().splitlines()[-8:]
            raise FailedError("\n".join([f"{len(found)} of {expected} rates from {' '.join(commands[0])}", *last]))
    rate = sum(r for r, _ in found)
    return Sample(rate, 1000 * statistics.mean(c for _, c in found) / rate)


def quorum(rule: str, transport: str, o: Options) -> Sample:
    """Measures torchquorum with 1 ps and 2 workers."""
    run = ["env", *(f"{name}={value}" for name, value in o.environment.items())]
    run += [sys.executable, "-m", "torchquorum.cli.main", "run", "--transport", transport]
    work = [rule, str(o.seconds), str(o.warm_up), o.optimizer, o.logdir, o.durable]
    return sample([[*run, "quorum_loop.py", *work]], 2, reporting=[0])


def independent(o: Options) -> Sample:
    """Measures two trainers that share nothing."""
    one = [sys.executable, "torch_loop.py", "alone", str(o.seconds), str(o.warm_up), o.optimizer]
    return sample([one, one], 2, reporting=[0, 1])


def ddp(o: Options) -> Sample:
    """Measures PyTorch's DistributedDataParallel over gloo with 2 ranks."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return sample([[*run, "torch_loop.py", "ddp", str(o.seconds), str(o.warm_up), o.optimizer]], 2, reporting=[0])


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens at now."""
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def tensorflow(o: Options, *, sync: bool) -> Sample:
    """Measures TensorFlow's ps with 2 workers, as its chief sees it; the others are ended, for one alone would stall."""
    ps, *workers = (f"localhost:{port}" for port in free_ports(3))
    base = ["env", "TF_CPP_MIN_LOG_LEVEL=3", str(o.tensorflow), "tensorflow_ps.py", f"--ps_hosts={ps}"]
    base += [f"--worker_hosts={','.join(workers)}", f"--seconds={o.seconds}", f"--warm_up={o.warm_up}"]
    base += ["--sync"] if sync else []
    tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
    return sample([[*base, f"--job_name={job}", f"--task_index={i}"] for job, i in tasks], 1, reporting=[1])


def measures(o: Options) -> dict[str, Callable[[], Sample]]:
    """Returns what is measured, by name."""
    found: dict[str, Callable[[], Sample]] = {
        INDEPENDENT: lambda: independent(o),
        "async shm": lambda: quorum("async", "shm", o),
        "async pipeline shm": lambda: quorum("async:pipeline", "shm", o),
        "sync shm": lambda: quorum("sync", "shm", o),
        "async tcp": lambda: quorum("async", "tcp", o),
        "sync tcp": lambda: quorum("sync", "tcp", o),
        DDP: lambda: ddp(o),
    }
    if o.tensorflow:
        found[TF_ASYNC] = lambda: tensorflow(o, sync=False)
        found[TF_SYNC] = lambda: tensorflow(o, sync=True)
    return found


def measure(o: Options, rounds: int, only: Sequence[str]) -> Result:
    """Measures everything in turns, round after round."""
    chosen = {name: m for name, m in measures(o).items() if not only or name in only or name == INDEPENDENT}
    seen: dict[str, list[Sample]] = {name: [] for name in chosen}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name in [n for n in chosen if n not in failed]:
            try:
                seen[name].append(chosen[name]())
            except FailedError as error:
                failed[name] = str(error)
                print(f"  {name} failed: {error}", flush=True)
                continue
            print(f"  round {number + 1}  {name:20} {seen[name][-1].rate:8.1f} batches/s", flush=True)
    rows = rows_of({name: samples for name, samples in seen.items() if samples})
    notes = [f"{name} failed: {why.splitlines()[0]}" for name, why in failed.items()]
    if not o.tensorflow:
        notes.append("TensorFlow was not measured: TF_PYTHON names no interpreter that has it")
    return Result("speed", "1 ps, 2 workers: " + _work(), rows, floors_of(rows), notes)


def _work() -> str:
    return "MNIST, mlp 784-500-10 (1.59 MB), batch 100, SGD 0.01, L2 1e-4, one thread a process"


def rows_of(seen: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Returns medians, spreads and ratios."""
    medians = {name: statistics.median(s.rate for s in samples) for name, samples in seen.items()}
    rows = []
    for name, samples in seen.items():
        peer = TF_SYNC if "sync" in name.split() else TF_ASYNC
        row: dict[str, Any] = {
            "name": name,
            "batches_per_s": round(medians[name], 1),
            "low": round(min(s.rate for s in samples), 1),
            "high": round(max(s.rate for s in samples), 1),
            "cpu_ms_per_batch": results.middle(s.cpu_ms for s in samples),
        }
        for key, other in (("of_independent", INDEPENDENT), ("times_ddp", DDP), ("times_tensorflow", peer)):
            row[key] = round(medians[name] / medians[other], 3) if other in medians else None
        rows.append(row)
    return rows


def floors_of(rows: Sequence[dict[str, Any]]) -> list[Floor]:
    """Returns the floors of what was measured."""
    wanted = [
        ("async shm", "of_independent", 0.80, " of independent"),
        ("async shm", "times_tensorflow", 2.7, " x TensorFlow async"),
        ("sync shm", "of_independent", 0.70, " of independent"),
        ("sync shm", "times_ddp", 1.45, " x DDP"),
        ("sync shm", "times_tensorflow", 2.8, " x TensorFlow sync"),
        ("async tcp", "of_independent", 0.55, " of independent"),
        ("sync tcp", "times_ddp", 1.0, " x DDP"),
    ]
    by_name = {row["name"]: row for row in rows}
    return [
        Floor(name, by_name[name][key], bound, unit)
        for name, key, bound, unit in wanted
        if name in by_name and by_name[name][key] is not None
    ]


def show(result: Result) -> None:
    """Prints the table."""
    head = ["", "batches/s", "spread", "CPU ms/batch", "of independent", "x DDP", "x TensorFlow"]
    rows = [
        [
            row["name"],
            f"{row['batches_per_s']:.1f}",
            f"{row['low']:.1f} .. {row['high']:.1f}",
            f"{row['cpu_ms_per_batch']:.2f}",
            *(f"{row[k]:.2f}" if row[k] else "-" for k in ("of_independent", "times_ddp", "times_tensorflow")),
        ]
        for row in result.rows
    ]
    print(results.table(head, rows))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=200, help="batches of each worker before the clock starts")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter that has tensorflow")
    parser.add_argument("--only", default="", help="comma-separated names to measure, beside independent")
    args = parser.parse_args()
    options = Options(args.seconds, args.warm_up, args.tensorflow or None)
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    unknown = set(only) - set(measures(options))
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(measures(options))}")
    results.report(lambda: measure(options, args.rounds, only), show, args.output)


if __name__ == "__main__":
    main()
