"""A user's program of which one task ends in a chosen way at a chosen moment: the program of `exits`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.server import ending, followers, serve

MIDDLE = 8
MOMENTS = {"before the first step": 0, "in the middle": MIDDLE, "at the end": 1 << 30}
GATE_S = 60.0


class Numbers(Dataset[torch.Tensor]):
    """Batches for ever; the one at `bad` cannot be read."""

    def __init__(self, bad: int) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._bad:
            raise OSError("this record is damaged")
        return torch.full((4,), float(index % 7))


class RaisingHook(tq.Hook):
    """Raises after a local step."""

    def __init__(self, at: int) -> None:
        self._at = at

    def after_run(self, session: Any, ran: Any) -> None:
        if session.local_step >= self._at:
            raise ValueError("a hook raises")


def end(way: str) -> None:
    """Ends this program, or lets it be ended."""
    if way == "an exception":
        raise ValueError("boom")
    if way == "a KeyboardInterrupt of its own":
        raise KeyboardInterrupt
    if way == "sys.exit(3)":
        sys.exit(3)
    if way == "sys.exit()":
        sys.exit()
    if way == "os._exit(3)":
        os._exit(3)
    if way == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    if way.startswith("Ctrl-C"):
        os.kill(os.getpid(), signal.SIGINT)
    if way == "Ctrl-C twice":
        time.sleep(0.3)  # or they are one
        os.kill(os.getpid(), signal.SIGINT)


def wait_for(path: Path) -> None:
    """Waits until there is a file."""
    deadline = time.monotonic() + GATE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.005)


def prepare_ps(args: argparse.Namespace) -> None:
    """On a ps the program is inside `tq.join()` until the run is over: its end comes before that, or from a thread of its own."""
    ending.LATE_S, ending.IDLE_S, followers.ASK_S = 1.0, 8.0, 2.0
    serve.LEADER_SILENCE_S, serve.WAIT_FOR_CHIEF_S = 4.0, 8.0
    if args.victim != f"{args.job_name}/{args.task_index}" or args.job_name != "ps":
        return
    if args.way == "an exception":
        raise ValueError("boom")

    def strike() -> None:
        wait_for(args.gates / "strike")
        end(args.way)

    threading.Thread(target=strike, daemon=True).start()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--victim")
    made.add_argument("--way")
    made.add_argument("--moment")
    made.add_argument("--rule")
    made.add_argument("--steps", type=int)
    made.add_argument("--start", type=float, default=60.0)
    made.add_argument("--logdir")
    made.add_argument("--gates", type=Path)
    return made


def main() -> None:
    known = parser()
    known.add_argument("--job_name")
    known.add_argument("--task_index")
    prepare_ps(known.parse_known_args()[0])
    task = tq.join()
    args = parser().parse_args()
    tempfile.tempdir = os.path.dirname(args.logdir)  # where multiprocessing keeps what a forked task does not clear
    mine = args.victim == f"worker/{task.index}"
    at = MOMENTS[args.moment]
    bad = at if mine and args.way == "a DataLoader" else -1
    data = DataLoader(Numbers(bad), None, num_workers=1 if bad >= 0 else 0)
    model = nn.Linear(4, 1)
    schedule = None
    if args.way == "an update that fails":
        schedule = tq.schedule("OneCycleLR", max_lr=0.001, total_steps=max(2, min(at, args.steps - 1)))
    optimizer = tq.Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), rule=parse_rule(args.rule), schedule=schedule
    )
    hooks = [RaisingHook(max(at, 1))] if mine and args.way == "a hook" else []
    with tq.Session(
        task,
        model,
        optimizer,
        logdir=args.logdir,
        last_step=args.steps,
        wait_for_workers=2,
        hooks=hooks,
        save_every_steps=10,
        patience=tq.types.Patience(start_s=args.start),
    ) as session:
        batches = iter(data)
        while not session.should_stop():
            if session.local_step == at:
                come(args, mine)
            optimizer.zero_grad()
            loss = model(next(batches)).square().mean()
            loss.backward()
            optimizer.step(loss=loss)
            time.sleep(0.005)
        if args.moment == "at the end":
            come(args, mine)
    print(f"done at {session.global_step}", flush=True)


def come(args: argparse.Namespace, mine: bool) -> None:
    """The moment has come: this task's own end, or, where a ps meets it, a gate."""
    if mine:
        end(args.way)
    elif args.victim.startswith("ps"):
        print("at the gate", flush=True)
        wait_for(args.gates / "go")


if __name__ == "__main__":
    main()
