"""Workers that push ready-made gradients: what remains is the cost of torchquorum itself.

Called by load.py and scaling.py. A cluster is forked from this process, so that 32 workers cost one import of torch. A
worker that pauses stands for one whose batch is computed elsewhere, by a GPU for instance, and takes that long. Clusters that are
compared can be up at the same time and push in turns, half a second each: what neighbours do to the machine meets all alike.
"""

import math
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import results
import torch
from family import family_cpu_seconds
from torch import nn

import torchquorum as tq

WARM_UP_S, WARM_UP_EACH_S = 0.3, 0.03  # each worker shall have touched its memory before the clock runs
LEAST_STEPS = 5
DEADLINE_S = 120.0
KEPT = 20_000  # latencies of one worker
TURN_S, SETTLE_S = 0.6, 0.15  # of a turn the beginning is not counted: whoever pushed before finishes, caches fill
LEAST_TURNS = 3


@dataclass(frozen=True)
class Push:
    """What is pushed, by how many, to how many, for how long."""

    numel: int
    workers: int
    ps: int = 1
    transport: str = "shm"
    seconds: float = 1.5
    pause_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of a gradient."""
        return 4 * self.numel


def make_model(numel: int, pieces: int = 4) -> nn.Module:
    """Returns a module with so many parameters, in a few variables, so that several ps tasks can share them."""
    pieces = min(pieces, numel)
    sizes = [numel // pieces] * (pieces - 1)
    return nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in [*sizes, numel - sum(sizes)]])


def _ready_made(push: Push) -> tuple[nn.Module, tq.Optimizer]:
    torch.set_num_threads(1)
    model = make_model(push.numel)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)
    return model, tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), rule=tq.Async())


def _work(push: Push, together: Barrier) -> dict[str, Any]:
    task = tq.join()
    model, optimizer = _ready_made(push)
    took: list[float] = []
    with tq.Session(task, model, optimizer, wait_for_workers=push.workers):
        _push_for(optimizer, WARM_UP_S + WARM_UP_EACH_S * push.workers, push.pause_s, [])
        together.wait()
        cpu, began = family_cpu_seconds() if task.index == 0 else 0.0, time.perf_counter()
        count = _push_for(optimizer, push.seconds, push.pause_s, took)
        seconds = time.perf_counter() - began
        together.wait()
        used = family_cpu_seconds() - cpu if task.index == 0 else 0.0
        together.wait()  # whoever leaves takes his CPU time with him
    return {"rate": count / seconds, "cpu": used / seconds, "took": took[:KEPT]}


def _push_for(optimizer: tq.Optimizer, seconds: float, pause_s: float, took: list[float]) -> int:
    end, count = time.perf_counter() + seconds, 0
    while True:
        if pause_s:
            time.sleep(pause_s)
        began = time.perf_counter()
        if began >= end and count >= LEAST_STEPS:
            return count
        optimizer.step()
        took.append(time.perf_counter() - began)
        count += 1


def _push_until(optimizer: tq.Optimizer, end: float, took: list[float]) -> int:
    count = 0
    while (began := time.perf_counter()) < end:
        optimizer.step()
        took.append(time.perf_counter() - began)
        count += 1
    return count


def run(push: Push) -> dict[str, Any]:
    """Pushes, and returns pushes per second of all workers, CPU time per push, and latency percentiles of a step."""
    # With the package's own launcher and not `torchquorum run`: a fork costs a hundredth of an interpreter with torch.
    together = multiprocessing.get_context("fork").Barrier(push.workers, timeout=DEADLINE_S)
    said = tq.launch(_work, push, together, workers=push.workers, ps=push.ps, transport=push.transport, quiet=True)
    return _row(push, sum(w["rate"] for w in said), said[0]["cpu"], [t for w in said for t in w["took"]])


def _row(push: Push, rate: float, cpu: float, latencies: list[float]) -> dict[str, Any]:
    """Returns the figures: pushes and CPU seconds per second, and how long steps took."""
    took = torch.tensor(latencies, dtype=torch.float64)
    p50, p95, p99 = (1000 * took.quantile(q).item() if len(took) else 0.0 for q in (0.50, 0.95, 0.99))
    return {
        "bytes": push.size_bytes,
        "workers": push.workers,
        "ps": push.ps,
        "transport": push.transport,
        "pushes_per_s": round(rate, 1),
        "mb_per_s": round(2 * rate * push.size_bytes / 1e6, 1),
        "cpu_ms_per_push": round(1000 * cpu / rate, 3),
        "p50_ms": round(p50, 3),
        "p95_ms": round(p95, 3),
        "p99_ms": round(p99, 3),
    }


def run_in_turns(pushes: Sequence[Push]) -> list[dict[str, Any]]:
    """Has all clusters up at the same time, each pushing in its turn, for as long as the first says; returns medians of turns."""
    fork = multiprocessing.get_context("fork")
    turns = max(LEAST_TURNS, math.ceil(pushes[0].seconds / (TURN_S - SETTLE_S)))
    together = fork.Barrier(sum(push.workers for push in pushes), timeout=DEADLINE_S)
    begins = fork.Value("d", 0.0, lock=False)
    started = []
    for k, push in enumerate(pushes):
        here, there = fork.Pipe(duplex=False)
        when = _Turns(k, len(pushes), turns)
        process = fork.Process(target=_launch, args=(push, when, together, begins, there))
        process.start()
        there.close()
        started.append((push, process, here))
    rows = []
    for push, process, here in started:
        said = here.recv()
        process.join(DEADLINE_S)
        rates = [sum(counts) / (TURN_S - SETTLE_S) for counts in zip(*(w["counts"] for w in said), strict=True)]
        rate = results.middle(rates)
        cpu = rate * said[0]["cpu"] / sum(w["pushes"] for w in said)
        row = _row(push, rate, cpu, [t for w in said for t in w["took"]])
        rows.append({**row, "turns": [round(r, 1) for r in rates]})
    return rows


@dataclass(frozen=True)
class _Turns:
    """Which of so many clusters this is, and how often it pushes."""

    index: int
    clusters: int
    turns: int


def _launch(push: Push, when: _Turns, together: Barrier, begins: Any, there: Connection) -> None:
    work = (_work_in_turns, push, when, together, begins)
    there.send(tq.launch(*work, workers=push.workers, ps=push.ps, transport=push.transport, quiet=True))


def _work_in_turns(push: Push, when: _Turns, together: Barrier, begins: Any) -> dict[str, Any]:
    task, settling = tq.join(), 0
    model, optimizer = _ready_made(push)
    counts: list[int] = []
    took: list[float] = []
    with tq.Session(task, model, optimizer, wait_for_workers=push.workers):
        _push_for(optimizer, WARM_UP_S + WARM_UP_EACH_S * push.workers, 0.0, [])
        if together.wait() == 0:
            begins.value = time.perf_counter() + SETTLE_S  # the same clock in all processes
        together.wait()
        used = family_cpu_seconds()
        for turn in range(when.turns):
            began = begins.value + (turn * when.clusters + when.index) * TURN_S
            time.sleep(max(0.0, began - time.perf_counter()))
            settling += _push_until(optimizer, began + SETTLE_S, [])
            counts.append(_push_until(optimizer, began + TURN_S, took))
        together.wait()
        cpu = family_cpu_seconds() - used
        together.wait()  # whoever leaves takes his CPU time with him
    return {"counts": counts, "pushes": settling + sum(counts), "cpu": cpu, "took": took[:KEPT]}


COLUMNS = ["pushes_per_s", "mb_per_s", "cpu_ms_per_push", "p50_ms", "p95_ms", "p99_ms"]
HEAD = ["pushes/s", "MB/s both ways", "CPU ms/push", "p50 ms", "p95 ms", "p99 ms"]


def median_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one row of several of the same push: the medians of its figures."""
    return {**rows[0], **{c: results.middle((row[c] for row in rows), 3) for c in COLUMNS}}


def cells(row: dict[str, Any]) -> list[str]:
    """Returns the figures of a row as text."""
    return [f"{row[c]:,.0f}" if c in COLUMNS[:2] else f"{row[c]:.3g}" for c in COLUMNS]


def size(size_bytes: float) -> str:
    """Returns a size as people write it."""
    return f"{size_bytes / 1e6:.3g} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.3g} kB"
