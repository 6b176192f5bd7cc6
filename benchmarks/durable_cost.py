"""What a journal costs a ps: microseconds per update of the MLP 784-500-10, with and without.

    python benchmarks/durable_cost.py [--updates 300] [--folder FOLDER]

A shard is given gradients in its own process, so only the update and the journal are measured, in turns, and the median of
the rounds is printed: `wall` with the waits for the disk, `cpu` without. The share of a whole step is smaller: workers compute
meanwhile.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

import torchquorum as tq
import torchquorum.wire.messages as m
from torchquorum.placement.layout import Variable
from torchquorum.server.journaling import begin_journal
from torchquorum.server.shard import Shard

SHAPES = {"fc1.weight": (500, 784), "fc1.bias": (500,), "fc2.weight": (10, 500), "fc2.bias": (10,)}
ROUNDS = 5


def measure(mode: str, updates: int, folder: Path) -> tuple[float, float]:
    """Returns the microseconds per update: by the clock, and of the processor."""
    plan = m.Plan(
        variables=[Variable(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()],
        optimizer=m.OptimizerSpec("SGD", [{"lr": 0.1}]),
        rule=tq.Async(),
        num_shards=1,
        num_workers=1,
        durable=mode,
        logdir=str(folder),
    )
    region = plan.layout().trained[0]
    shard = Shard(0, plan, bytes(region.size_bytes), b"")
    gradient = torch.randn(region.size_bytes // 4).view(torch.uint8).numpy().tobytes()
    try:
        shard.journal = begin_journal(shard, m.Create(plan, None, 1, False, m.JournalRef(0, 0, 0, 1)))
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(1, updates + 1):
            shard.store(m.Push(0, 1, step, step, step - 1, -1, [], None), [gradient])
            shard.follow(m.Apply([(0, 1, step)], step))
            if shard.journal is not None:
                shard.journal.commit()
        return (time.perf_counter() - wall) / updates * 1e6, (time.process_time() - cpu) / updates * 1e6
    finally:
        shard.close()
        for path in folder.glob("*.journal"):
            path.unlink()


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description="What a journal costs a ps.")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="durable-"))
    found: dict[str, list[tuple[float, float]]] = {"": [], "write": [], "fsync": []}
    try:
        for _ in range(ROUNDS):
            for mode, results in found.items():
                results.append(measure(mode, args.updates, folder))
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print("| journal | wall, us per update | cpu, us per update |")
    print("| --- | --- | --- |")
    for mode, results in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"| {mode or 'none'} | {wall:.0f} | {cpu:.0f} |")


if __name__ == "__main__":
    main()
