"""Counts as program.py does, and sends itself a signal at a chosen moment of its step on the board.

Moments: `turn` (it has its turn and writes), `lock` (it holds the board's lock), `round` (it is going to give its gradient to the
round), `given` (it has given it), `part` (it writes its part of the next version).
"""

import argparse
import os
import signal
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.transport.board import Board
from torchquorum.worker.board_steps import BoardSteps
from torchquorum.worker.client import Patience

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--rule", default="async")
parser.add_argument("--steps", type=int, default=3000)
parser.add_argument("--moment", default="")
parser.add_argument("--signal", default="SIGKILL")
parser.add_argument("--at", type=int, default=100)
args = parser.parse_args()
on_board, hit = 0, False


def now(moment: str) -> None:
    global hit
    if moment == args.moment and on_board >= args.at and not hit:
        hit = True
        print(f"{args.signal} in {moment}", flush=True)
        os.kill(os.getpid(), getattr(signal, args.signal))


def before(name: str, moment: str) -> None:
    inner = getattr(BoardSteps, name)

    def wrapped(self: Any, *given: Any, **named: Any) -> Any:
        now(moment)
        return inner(self, *given, **named)

    setattr(BoardSteps, name, wrapped)


def round_noted(self: Any, *given: Any) -> Any:
    taken = _in_round(self, *given)
    if taken is None:
        print("beside the board", flush=True)
    return taken


_in_round = BoardSteps._in_round
BoardSteps._in_round = round_noted  # type: ignore[method-assign]
before("_write", "turn")
before("_in_round", "round")
before("_until", "given")
before("_write_part", "part")
_locked = Board.locked


@contextmanager
def locked(self: Any, *given: Any) -> Any:
    with _locked(self, *given) as held:
        now("lock")
        yield held


Board.locked = locked  # type: ignore[method-assign]
model = nn.Linear(30, 30)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
        parameter.grad = -torch.ones_like(parameter)
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=parse_rule(args.rule))
patience = Patience(start_s=60.0, round_s=60.0, silence_s=20.0, probe_s=0.2, say_s=5.0)
options = {"last_step": args.steps, "liveness_s": 1.5, "patience": patience, "wait_for_workers": task.num_workers}
with tq.Session(task, model, optimizer, **options) as session:
    print("started", flush=True)
    while not session.should_stop():
        step = optimizer.step()
        steps = session._known()._board  # pyright: ignore[reportPrivateUsage]
        on_board = steps.made if steps is not None else 0
        assert set(model.weight.detach().flatten().tolist()) == {float(step.version)}, step
        if not step.accepted:
            print(f"refused {step.reason}", flush=True)
print(f"done at {session.global_step}, {on_board} on the board", flush=True)
