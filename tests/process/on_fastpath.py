"""Counts as program.py does, and sends itself a signal at a chosen moment of its step on the fast path.

Moments: `turn` (it has its turn and writes), `lock` (it holds the page's lock), `round` (it is going to give its gradient to the
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
from torchquorum.fastpath.page import FastPage
from torchquorum.fastpath.participant import Participant
from torchquorum.fastpath.rounds import CpuRound, RoundSteps
from torchquorum.fastpath.steps import FastPathSteps
from torchquorum.fastpath.turns import CpuTurn
from torchquorum.rules import parse_rule
from torchquorum.wire.rpc import Patience

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--rule", default="async")
parser.add_argument("--steps", type=int, default=3000)
parser.add_argument("--moment", default="")
parser.add_argument("--signal", default="SIGKILL")
parser.add_argument("--at", type=int, default=100)
args = parser.parse_args()
made, hit = 0, False


def now(moment: str) -> None:
    global hit
    if moment == args.moment and made >= args.at and not hit:
        hit = True
        print(f"{args.signal} in {moment}", flush=True)
        os.kill(os.getpid(), getattr(signal, args.signal))


def before(kind: type[Any], name: str, moment: str) -> None:
    inner = getattr(kind, name)

    def wrapped(self: Any, *given: Any, **named: Any) -> Any:
        now(moment)
        return inner(self, *given, **named)

    setattr(kind, name, wrapped)


def noted(self: Any, *given: Any) -> Any:
    global made
    found = step(self, *given)
    made += found is not None
    if found is None:
        print("beside the fast path", flush=True)
    return found


step = FastPathSteps.step
FastPathSteps.step = noted  # type: ignore[method-assign]
before(CpuTurn, "write", "turn")
before(RoundSteps, "step", "round")
before(Participant, "until", "given")
before(CpuRound, "write", "part")
_locked = FastPage.locked


@contextmanager
def locked(self: Any, *given: Any) -> Any:
    with _locked(self, *given) as held:
        now("lock")
        yield held


FastPage.locked = locked  # type: ignore[method-assign]
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
        optimizer.step()
        result = optimizer.last
        assert set(model.weight.detach().flatten().tolist()) == {float(result.version)}, result
        if not result.accepted:
            print(f"refused {result.reason}", flush=True)
print(f"done at {session.global_step}, {made} on the fast path", flush=True)
