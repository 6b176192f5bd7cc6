"""Workers that push ready-made gradients: what remains is the cost of torchquorum itself.

Called by load.py and scaling.py. A cluster is forked from this process, so that 32 workers cost one import of torch. A
worker that pauses stands for one whose batch is computed elsewhere, by a GPU for instance, and takes that long.
"""

import multiprocessing
import time
from dataclasses import dataclass
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


def _work(push: Push, together: Barrier) -> dict[str, Any]:
    task = tq.join()
    torch.set_num_threads(1)
    model = make_model(push.numel)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), rule=tq.Async())
    took: list[float] = []
    with tq.Session(task, model, optimizer, wait_for_workers=push.workers):
        _push_for(optimizer, WARM_UP_S + WARM_UP_EACH_S * push.workers, push.pause_s, [])
        together.wait()
        cpu, began = family_cpu_seconds() if task.index == 0 else 0.0, time.perf_counter()
        count = _push_for(optimizer, push.seconds, push.pause_s, took)
        seconds = time.perf_counter() - began
        together.wait()  # whoever leaves takes his CPU time with him
        used = family_cpu_seconds() - cpu if task.index == 0 else 0.0
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


def run(push: Push) -> dict[str, Any]:
    """Pushes, and returns pushes per second of all workers, CPU time per push, and latency percentiles of a step."""
    # With the package's own launcher and not `torchquorum run`: a fork costs a hundredth of an interpreter with torch.
    together = multiprocessing.get_context("fork").Barrier(push.workers, timeout=DEADLINE_S)
    said = tq.launch(_work, push, together, workers=push.workers, ps=push.ps, transport=push.transport, quiet=True)
    rate = sum(worker["rate"] for worker in said)
    took = torch.tensor([t for worker in said for t in worker["took"]], dtype=torch.float64)
    p50, p95, p99 = (1000 * took.quantile(q).item() if len(took) else 0.0 for q in (0.50, 0.95, 0.99))
    return {
        "bytes": push.size_bytes,
        "workers": push.workers,
        "ps": push.ps,
        "transport": push.transport,
        "pushes_per_s": round(rate, 1),
        "mb_per_s": round(2 * rate * push.size_bytes / 1e6, 1),
        "cpu_ms_per_push": round(1000 * said[0]["cpu"] / rate, 3),
        "p50_ms": round(p50, 3),
        "p95_ms": round(p95, 3),
        "p99_ms": round(p99, 3),
    }


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
