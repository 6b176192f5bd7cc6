"""Counts as program.py does, and sends itself a signal at a chosen moment of its step on the fast path.

Moments: `turn` (it has its turn and writes), `lock` (it holds the page's lock), `round` (it is going to give its gradient to the
round), `given` (it has given it), `part` (it writes its part of the next version); in a durable run also `record` (it is going to write
its record to the journal), `torn` (it has written half of it), `written` (it has written all, and not published the version), `counted`
(others see the version, and it has not been told of it).
"""

import argparse
import os
import signal
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import torchquorum as tq
from torchquorum.fastpath import update_journal
from torchquorum.fastpath.page import FastPage
from torchquorum.fastpath.participant import Participant
from torchquorum.fastpath.rounds import CpuRound, RoundSteps
from torchquorum.fastpath.steps import FastPathSteps
from torchquorum.fastpath.turns import CpuTurn
from torchquorum.fastpath.update_journal import UpdateJournal
from torchquorum.formats.journal_write import frame_of
from torchquorum.rules import parse_rule
from torchquorum.wire.rpc import Patience

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.25),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.25),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.25),
}
task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--rule", default="async")
parser.add_argument("--steps", type=int, default=3000)
parser.add_argument("--moment", default="")
parser.add_argument("--signal", default="SIGKILL")
parser.add_argument("--at", type=int, default=100)
parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
parser.add_argument("--logdir")
parser.add_argument("--durable", default="")
parser.add_argument("--tell", action="store_true")
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
before(UpdateJournal, "append", "record")
before(UpdateJournal, "survives", "counted")


def written_in_halves(fd: int, at: int, packed: bytes, pieces: Any, checksum: int) -> int:
    if args.moment == "torn" and made >= args.at and not hit:
        half = b"".join([frame_of(packed, sum(map(len, pieces)), checksum), packed, *map(bytes, pieces)])
        os.pwrite(fd, half[: len(half) // 2], at)
        now("torn")
    end = _write_record(fd, at, packed, pieces, checksum)
    now("written")
    return end


_write_record, update_journal.write_record = update_journal.write_record, written_in_halves
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
optimizer = tq.Optimizer(OPTIMIZERS[args.optimizer](model.parameters()), rule=parse_rule(args.rule))
plain = torch.nn.Parameter(torch.zeros(8))
plain.grad = -torch.ones(8)
reference, values = OPTIMIZERS[args.optimizer]([plain]), [0.0]


def value_at(version: int) -> float:
    """What plain PyTorch makes of so many of these gradients: every update counts once, and so does its state."""
    while len(values) <= version:
        reference.step()
        values.append(plain[0].item())
    return values[version]


patience = Patience(start_s=60.0, round_s=60.0, silence_s=20.0, probe_s=0.2, say_s=5.0)
options = {"last_step": args.steps, "liveness_s": 1.5, "patience": patience, "wait_for_workers": task.num_workers}
if args.durable:
    options |= {"logdir": args.logdir, "durable": args.durable}
with tq.Session(task, model, optimizer, **options) as session:
    print(f"started at {session.global_step}", flush=True)
    while not session.should_stop():
        optimizer.step()
        result = optimizer.last
        assert set(model.weight.detach().flatten().tolist()) == {value_at(result.version)}, result
        if args.tell:
            print(f"told {result.version}", flush=True)
        if not result.accepted:
            print(f"refused {result.reason}", flush=True)
print(f"done at {session.global_step}, {made} on the fast path", flush=True)
