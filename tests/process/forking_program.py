"""A user's program whose children are forks of it, or are spawned by it, and end in every way."""

import multiprocessing
import os
import signal
import sys
import time

import torch
from torch import nn

import torchquorum as tq


def step_in_a_child(optimizer: tq.Optimizer) -> None:
    """A child that multiprocessing has forked tries to speak for its worker."""
    try:
        optimizer.step()
    except tq.errors.ConfigError as error:
        print(f"refused in a child: {error}", flush=True)
        sys.exit(0)
    sys.exit("a child has made a step")


def wait_for_ever() -> None:
    """A child that its parent ends with SIGTERM."""
    time.sleep(600)


def spawned() -> None:
    """A child that multiprocessing has spawned: the program is imported again."""
    print("spawned", flush=True)


class ChildError(Exception):
    """Ends a child inside the parent's block."""


def children(session: tq.Session, optimizer: tq.Optimizer) -> None:
    """Forks and spawns, and returns in the worker itself only."""
    for how in ("raise", "exit", "exit 3", "kill", "pull"):
        pid = os.fork()
        if pid == 0:
            if how == "raise":
                raise ChildError
            if how == "kill":
                os.kill(os.getpid(), signal.SIGTERM)  # ends it: a fork has not the handlers of its parent
                time.sleep(600)
            if how == "pull":
                session.pull()
            sys.exit(3 if how == "exit 3" else 0)
        print(f"{how}: {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)
    forks, spawns = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
    stepping, spawning = forks.Process(target=step_in_a_child, args=(optimizer,)), spawns.Process(target=spawned)
    for process in (stepping, spawning):
        process.start()
        process.join()
        print(f"{process.name}: {process.exitcode}", flush=True)
    ended = forks.Process(target=wait_for_ever)
    ended.start()
    ended.terminate()
    ended.join()
    print(f"terminated: {ended.exitcode}", flush=True)


if __name__ == "__main__":
    task = tq.join()
    model = nn.Linear(3, 2)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule=tq.Sync())
    with tq.Session(task, model, optimizer, last_step=40) as session:
        while not session.should_stop():
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            if session.local_step == 10 and task.index == 1:
                children(session, optimizer)
    print(f"done at {session.global_step}", flush=True)
