"""What a checkpoint of a large model costs: memory of each ps task before and at most, time, and steps made meanwhile.

    torchquorum run --ps 2 --workers 1 benchmarks/large_checkpoint.py --logdir FOLDER [--millions 100]

A model of so many million float32 parameters under Adam: variables and two states, so three times its bytes on disk.
"""

import argparse
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn

import torchquorum as tq

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--logdir", required=True)
parser.add_argument("--millions", type=int, default=100)
parser.add_argument("--seconds", type=float, default=5.0)
parser.add_argument("--layers", type=int, default=20)
args = parser.parse_args()


def resident_bytes(pid: int) -> int:
    """Returns the memory of a process that is in use, shared memory included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ps_processes() -> list[int]:
    """Returns the ps tasks beside this process: children of the same launcher that this process is not."""
    text = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text()
    return [pid for pid in map(int, text.split()) if pid != os.getpid()]


class Watch(threading.Thread):
    """Notes the most memory that each process has held."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.before = {pid: resident_bytes(pid) for pid in pids}
        self.most = dict(self.before)
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        """Looks a hundred times a second."""
        while not self.done.wait(0.01):
            for pid in self.most:
                self.most[pid] = max(self.most[pid], resident_bytes(pid))

    def end(self) -> None:
        """Stops looking."""
        self.done.set()
        self.join()


model = nn.Module()
each = args.millions * 1_000_000 // args.layers
for i in range(args.layers):
    model.register_parameter(f"layer{i}", nn.Parameter(torch.zeros(each)))
optimizer = tq.Optimizer(torch.optim.Adam(model.parameters(), lr=0.001), rule=tq.Async())
for parameter in model.parameters():
    parameter.grad = torch.full_like(parameter, 0.01)
with tq.Session(task, model, optimizer, logdir=args.logdir, save_every_s=0, restore=False) as session:
    for _ in range(3):
        optimizer.step()
    without = Watch(ps_processes())
    begun, steps_without = time.monotonic(), 0
    while time.monotonic() - begun < args.seconds:
        optimizer.step()
        steps_without += 1
    alone_s = time.monotonic() - begun
    without.end()
    watch = Watch(ps_processes())
    begun, steps = time.monotonic(), 0
    session.save()
    folder = Path(args.logdir) / f"model.ckpt-{session.global_step}"
    while not folder.exists() and time.monotonic() - begun < 300:
        optimizer.step()
        steps += 1
    seconds = time.monotonic() - begun
    watch.end()
shard_bytes = 3 * 4 * args.millions * 1_000_000 / task.num_ps
print(f"{args.millions} million parameters with Adam on {task.num_ps} ps tasks: {shard_bytes / 1e6:.0f} MB per shard")
for pid, most in watch.most.items():
    extra = most - without.most[pid]
    print(
        f"ps process: {without.most[pid] / 1e6:.0f} MB at most without a save, {most / 1e6:.0f} MB with one: "
        f"{extra / shard_bytes:.2f} shards more"
    )
print(
    f"saved in {seconds:.1f} s; meanwhile {steps / seconds:.2f} steps/s, without a save {steps_without / alone_s:.2f}"
)
