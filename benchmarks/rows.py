"""Examples per second of a recommender with tables on a ps, beside its limit and its peers, interleaved and repeated.

    python benchmarks/rows.py [--seconds 6] [--rounds 3] [--fbgemm FOLDER] [--tensorflow PYTHON]

`limit`: two trainers that share nothing, with the tables of fbgemm-gpu-cpu, if that is installed, in a folder of its own perhaps;
`plain`: two with nn.EmbeddingBag(sparse=True) and torch.optim.Adagrad; TensorFlow's own ps, async, if an interpreter has it. torchquorum:
one ps, two workers, async. What a step costs in CPU time, of all processes, hardly depends on what else the machine does. The curve is of
one table: an update of the same number of rows, beside a plain gather of them, from 1e5 to 1e7 rows.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import results
import torch
from results import Floor, Result
from rows_work import BATCH
from speed import FailedError, Sample, free_ports, sample

from torchquorum.update.row_kernels import KERNELS
from torchquorum.update.table import RowMoment, TablePart
from torchquorum.wire.plan import InitSpec, TableSpec

HERE = Path(__file__).resolve().parent
LIMIT, PLAIN, TF = "two of fbgemm-gpu-cpu", "two of torch.optim.Adagrad", "TensorFlow's ps"
SHM, TCP = "tq.Table, shm", "tq.Table, tcp"
SIZES = (100_000, 1_000_000, 10_000_000)
TOUCHED, DIM, STRIDE = 23_400, 16, 7919


def alone(kind: str, seconds: float, folder: str) -> Sample:
    """Measures two trainers that share nothing."""
    one = [[sys.executable, "rows_loop.py", kind, str(seconds), str(k), folder] for k in range(2)]
    return sample(one, 2, reporting=[0, 1])


def on_ps(kind: str, transport: str, seconds: float) -> Sample:
    """Measures torchquorum with one ps and two workers."""
    run = [sys.executable, "-m", "torchquorum.cli.main", "run", "--transport", transport]
    return sample([[*run, "rows_loop.py", kind, str(seconds)]], 2, reporting=[0])


def tensorflow(python: str, seconds: float) -> Sample:
    """Measures TensorFlow's ps with two workers, as its chief sees it."""
    ps, *workers = (f"localhost:{port}" for port in free_ports(3))
    base = ["env", "TF_CPP_MIN_LOG_LEVEL=3", python, "rows_tensorflow.py", "--ps_hosts", ps]
    base += ["--worker_hosts", ",".join(workers), "--seconds", str(seconds)]
    tasks = [[*base, "--job_name", job, "--task_index", str(k)] for job, k in (("ps", 0), ("worker", 0), ("worker", 1))]
    return sample(tasks, 1, reporting=[1])


def point(size: int) -> dict[str, float]:
    """Returns what a pull and an update of so many rows cost in a table of a size, in CPU milliseconds."""
    torch.set_num_threads(1)
    options, random = KERNELS["RowwiseAdagrad"].options({"lr": 0.01}), np.random.default_rng(0)
    table = TablePart(TableSpec(name="t", dim=DIM, optimizer="RowwiseAdagrad", init=InitSpec("zeros")))
    table.begin(options)
    for start in range(0, size, 100_000):
        keys = np.arange(start, min(size, start + 100_000), dtype=np.int64) * STRIDE
        table.apply(keys, torch.ones(len(keys), DIM), RowMoment(1, options))
    plain, costs, gathers = torch.zeros(size, DIM), list[float](), list[float]()
    for version in range(2, 22):
        places = np.unique(random.integers(0, size, TOUCHED))
        gradient = torch.randn(len(places), DIM)

        def update(keys: npt.NDArray[np.int64], rows: torch.Tensor, moment: RowMoment) -> None:
            table.gather(keys)
            table.apply(keys, rows, moment)

        costs.append(_cpu_ms(partial(update, places * STRIDE, gradient, RowMoment(version, options))) / len(places))
        gathers.append(_cpu_ms(partial(plain.index_select, 0, torch.from_numpy(places))) / len(places))
    beside = table.size_bytes / size - 8 - 4 * DIM - 4
    cost, gather = TOUCHED * min(costs), TOUCHED * min(gathers)
    return {"rows": size, "pull_and_update_ms": cost, "gather_ms": gather, "bytes_beside": beside}


def _cpu_ms(work: Callable[[], object]) -> float:
    before = time.thread_time()
    work()
    return 1000 * (time.thread_time() - before)


def measure(
    seconds: float, rounds: int, folder: str = "", sizes: tuple[int, ...] = SIZES, python: str | None = None
) -> Result:
    """Measures everything in turns, round after round."""
    ways: dict[str, Callable[[], Sample]] = {
        PLAIN: lambda: alone("sparse", seconds, folder),
        SHM: lambda: on_ps("table", "shm", seconds),
        TCP: lambda: on_ps("table", "tcp", seconds),
        "nn.EmbeddingBag, shm": lambda: on_ps("embedding", "shm", seconds),
        LIMIT: lambda: alone("fbgemm", seconds, folder),
    }
    if python:
        ways[TF] = lambda: tensorflow(python, seconds)
    seen: dict[str, list[Sample]] = {name: [] for name in ways}
    notes = list[str]()
    for number in range(rounds):
        for name in list(ways):
            try:
                seen[name].append(ways[name]())
            except FailedError as error:
                notes.append(f"{name} was not measured: {str(error).splitlines()[-1]}")
                del ways[name], seen[name]
        print(f"  round {number + 1} of {rounds}", flush=True)
    rows = [
        {
            "name": name,
            "examples_per_s": results.middle((s.rate for s in samples), 0),
            "cpu_ms": round(BATCH * statistics.median(s.cpu_ms for s in samples), 2),
        }
        for name, samples in seen.items()
    ]
    points = [point(size) for size in sizes]
    return Result("rows", "examples/s", [*rows, *points], floors(rows, points), notes)


def floors(rows: list[dict[str, float]], points: list[dict[str, float]]) -> list[Floor]:
    """Returns what must hold."""
    rate = {row["name"]: row["examples_per_s"] for row in rows}
    ours, found = rate.get(SHM, 0.0), list[Floor]()
    if LIMIT in rate:
        found.append(Floor("tq.Table over shared memory", round(ours / rate[LIMIT], 3), 0.70, " of the limit"))
    if PLAIN in rate:
        found.append(Floor("tq.Table over shared memory", round(ours / rate[PLAIN], 3), 1.2, " of plain trainers"))
    if TF in rate:
        found.append(Floor("tq.Table over shared memory", round(ours / rate[TF], 2), 2.0, " x TensorFlow"))
        found.append(Floor("tq.Table over TCP", round(rate.get(TCP, 0.0) / rate[TF], 2), 1.0, " x TensorFlow"))
    shares = [point["pull_and_update_ms"] / point["gather_ms"] for point in points]
    found.append(
        Floor("cost of a row, largest table by smallest", round(shares[-1] / shares[0], 2), 2.0, "", at_most=True)
    )
    most = max(point["bytes_beside"] for point in points)
    found.append(Floor("memory of a row beside key, values, state", round(most, 1), 64.0, " bytes", at_most=True))
    return found


def show(result: Result) -> None:
    """Prints the tables."""
    rows = [row for row in result.rows if "name" in row]
    print(
        results.table(
            ["", "examples/s", "CPU ms a batch"],
            [[row["name"], f"{row['examples_per_s']:,.0f}", f"{row['cpu_ms']:.1f}"] for row in rows],
        )
    )
    head = ["rows", "pull and update, ms", "plain gather, ms", "bytes a row beside"]
    points = [
        [
            f"{row['rows']:,}",
            f"{row['pull_and_update_ms']:.2f}",
            f"{row['gather_ms']:.2f}",
            f"{row['bytes_beside']:.1f}",
        ]
        for row in result.rows
        if "rows" in row
    ]
    print(results.table(head, points))
    results.say(result)


def main() -> None:
    """Measures, prints tables and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fbgemm", default="", metavar="FOLDER", help="where fbgemm-gpu-cpu is, if not installed here")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter that has tensorflow")
    args = parser.parse_args()
    results.report(lambda: measure(args.seconds, args.rounds, args.fbgemm, SIZES, args.tensorflow), show, args.output)


if __name__ == "__main__":
    main()
