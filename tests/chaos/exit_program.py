"""A user's program of which one worker ends in a chosen way at a chosen moment: the program of `exits`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.server import ending

MIDDLE = 8


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--victim", type=int)
    parser.add_argument("--way")
    parser.add_argument("--moment")
    parser.add_argument("--rule")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--logdir")
    ending.LATE_S = 1.0
    task = tq.join()
    args = parser.parse_args()
    tempfile.tempdir = os.path.dirname(args.logdir)  # where multiprocessing keeps what a forked task does not clear
    mine = task.index == args.victim
    at = {"before the first step": 0, "in the middle": MIDDLE, "at the end": 1 << 30}[args.moment]
    bad = at if mine and args.way == "a DataLoader" else -1
    data = DataLoader(Numbers(bad), None, num_workers=1 if bad >= 0 else 0)
    model = nn.Linear(4, 1)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.001), rule=parse_rule(args.rule))
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
    ) as session:
        batches = iter(data)
        while not session.should_stop():
            if mine and session.local_step == at:
                end(args.way)
            optimizer.zero_grad()
            loss = model(next(batches)).square().mean()
            loss.backward()
            optimizer.step(loss=loss)
            time.sleep(0.005)
        if mine and args.moment == "at the end":
            end(args.way)
    print(f"done at {session.global_step}", flush=True)


if __name__ == "__main__":
    main()
