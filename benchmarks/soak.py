"""`make soak`: a million updates of a small model while workers are killed at random; the ps task must not grow.

    python -m benchmarks.soak                          a million updates, a worker killed every 3 s
    python -m benchmarks.soak --updates 100000         fewer
    python -m benchmarks.soak --seconds 200            as many as fit into the time

Memory, threads, descriptors and mapped segments of the ps are sampled. The last quarter of the samples is compared with the
second, when caches are warm and workers have come and gone: more than the bound stated below is a failure, exit code 1.
Every task is a fork of this process, so that a killed worker is back at once.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.update.updater import warm_up
from torchquorum.wire.rpc import Patience

SAMPLES = 40
# What may be more at the end: memory of the allocator and of bounded books, one worker that is just coming and going.
BOUND_MB, BOUND_SHARE, BOUND_COUNT = 8.0, 0.10, 3


@dataclass
class Sample:
    """The ps task at one moment."""

    at_s: float
    step: int
    kills: int
    memory_mb: float
    threads: int
    descriptors: int
    segments: int


def train(args: argparse.Namespace, argv: list[str], logdir: str) -> None:
    """One task."""
    task = tq.join(argv)
    torch.manual_seed(0)
    model = nn.Linear(50, 10)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), rule=parse_rule(args.rule))
    with tq.Session(
        task,
        model,
        optimizer,
        logdir=logdir,
        last_step=args.updates,
        save_every_s=10.0,
        durable=args.durable or None,
        patience=Patience(start_s=120.0),
    ) as session:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        while not session.should_stop():
            optimizer.step()


def fork(args: argparse.Namespace, flags: list[str], job: str, index: int, logdir: str) -> int:
    """Starts a task as a fork of this process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        if job == "worker":
            os.dup2(nothing, 2)
        train(args, [*flags, f"--job_name={job}", f"--task_id={index}"], logdir)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def take_sample(pid: int, logdir: str, began: float, kills: int) -> Sample:
    """Looks at the ps."""
    proc = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
    maps = (proc / "maps").read_text()
    step = max((int(p.name.rpartition("-")[2]) for p in Path(logdir).glob("model.ckpt-*")), default=0)
    return Sample(
        at_s=time.monotonic() - began,
        step=step,
        kills=kills,
        memory_mb=int(status["VmRSS"].split()[0]) / 1024,
        threads=int(status["Threads"]),
        descriptors=len(os.listdir(proc / "fd")),
        segments=maps.count("memfd:torchquorum"),
    )


def run(args: argparse.Namespace) -> tuple[list[Sample], float, int, int]:
    """Trains and kills; returns the samples, how long it took, the updates made and the ps task's exit code."""
    logdir = tempfile.mkdtemp(prefix="soak-")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    workers = ",".join(f"127.0.0.1:{port + 1 + i}" for i in range(args.workers))
    flags = [f"--ps_hosts=127.0.0.1:{port}", f"--worker_hosts={workers}", f"--transport={args.transport}"]
    draw, began = random.Random(args.seed), time.monotonic()
    ps = fork(args, flags, "ps", 0, logdir)
    tasks = {fork(args, flags, "worker", i, logdir): i for i in range(args.workers)}
    samples: list[Sample] = []
    kills, code, next_kill, next_sample = 0, None, began + 5.0, began + 3.0
    try:
        while code is None:
            time.sleep(0.02)
            now = time.monotonic()
            code, pid = reap(ps, tasks)
            if pid is not None and now - began < args.seconds:
                tasks[fork(args, flags, "worker", pid, logdir)] = pid
            if code is not None:
                break
            if now >= next_sample:
                samples.append(take_sample(ps, logdir, began, kills))
                next_sample = now + max(0.5, min(args.seconds, 600) / SAMPLES)
            if now >= next_kill and tasks and now - began < args.seconds:
                os.kill(draw.choice(list(tasks)), signal.SIGKILL)
                kills, next_kill = kills + 1, now + draw.uniform(0.3, 1.7) * args.kill_every_s
            elif now - began > args.seconds:
                os.kill(ps, signal.SIGINT)  # the time is up: the run is stopped and saved
                args.seconds = float("inf")
        updates = max((int(p.name.rpartition("-")[2]) for p in Path(logdir).glob("model.ckpt-*")), default=0)
    finally:
        for pid in (ps, *tasks):
            if code is None or pid != ps:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    pass
        shutil.rmtree(logdir, ignore_errors=True)
    return samples, time.monotonic() - began, updates, code


def reap(ps: int, tasks: dict[int, int]) -> tuple[int | None, int | None]:
    """Returns the exit code of the ps if it has ended, and the index of a worker that was killed."""
    found, status = os.waitpid(-1, os.WNOHANG)
    if found == ps:
        return os.waitstatus_to_exitcode(status), None
    index = tasks.pop(found, None) if found else None
    return None, index if index is not None and os.WIFSIGNALED(status) else None


def judge(samples: list[Sample]) -> tuple[list[str], bool]:
    """Compares the last quarter with the second; returns a table and whether all stayed flat."""
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    lines, flat = (
        ["| of the ps | second quarter | last quarter | may be at most | |", "| --- | --- | --- | --- | --- |"],
        True,
    )
    for name, unit in (("memory_mb", " MB"), ("threads", ""), ("descriptors", ""), ("segments", "")):
        seen = [[getattr(s, name) for s in part] for part in (early, late)]
        # A worker that is there is a few descriptors: of counts the most of a quarter, when all were there, can be compared.
        before, after = (statistics.median(values) if unit else max(values) for values in seen)
        bound = before + (max(BOUND_MB, BOUND_SHARE * before) if unit else BOUND_COUNT)
        ok = after <= bound
        flat &= ok
        shown = name.removesuffix("_mb")
        lines.append(f"| {shown} | {before:g}{unit} | {after:g}{unit} | {bound:g}{unit} | {'ok' if ok else 'GROWS'} |")
    return lines, flat


def main() -> int:
    """Reads the arguments, soaks, prints the table."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, however many updates")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rule", default="async")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--durable", default="")
    parser.add_argument("--kill-every-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    args: Any = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    samples, seconds, updates, code = run(args)
    if len(samples) < 8:
        print(f"only {len(samples)} samples in {seconds:.0f} s: let it run longer")
        return 1
    print(f"{updates} updates in {seconds:.0f} s ({updates / seconds:.0f}/s), {samples[-1].kills} workers killed")
    lines, flat = judge(samples)
    print("\n".join(lines))
    print(f"the ps ended with {code}")
    return 0 if flat and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
