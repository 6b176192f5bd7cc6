"""A user's program, started as real processes by tests: counts instead of learning, so that every result is exact.

The one parameter's gradient is -1 and the learning rate 1, so the parameter always equals the version.
"""

import argparse
import time

import torch
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.worker.client import Patience

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--rule", default="sync")
parser.add_argument("--size", type=int, default=1000)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--liveness", type=float, default=5.0)
parser.add_argument("--silence", type=float, default=10.0)
parser.add_argument("--start", type=float, default=60.0)
parser.add_argument("--logdir")
parser.add_argument("--save-steps", type=int)
parser.add_argument("--afresh", action="store_true")
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--summaries", action="store_true")
parser.add_argument("--chief-late", type=float, default=0.0)
args = parser.parse_args()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(args.size))
        self.other = nn.Parameter(torch.zeros(17))


model = Counter()
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=parse_rule(args.rule))
patience = Patience(start_s=args.start, round_s=60.0, silence_s=args.silence, probe_s=0.2, say_s=2.0)
for parameter in model.parameters():
    parameter.grad = -torch.ones_like(parameter)
if task.is_chief and args.chief_late:
    print(f"coming {args.chief_late:g} s late", flush=True)
    time.sleep(args.chief_late)
with tq.Session(
    task,
    model,
    optimizer,
    last_step=args.steps,
    logdir=args.logdir,
    liveness_s=args.liveness,
    save_every_steps=args.save_steps,
    start_afresh=args.afresh,
    patience=patience,
    hooks=[tq.SummaryHook(every_steps=2)] if args.summaries else [],
) as session:
    print(f"started at {session.global_step} over {'+'.join(session.transports)}", flush=True)
    while not session.should_stop():
        step = optimizer.step(loss=1.0)
        print(f"local {step.local_step} global {step.version} accepted {step.accepted} {step.reason}", flush=True)
        assert int(model.count.min()) == int(model.count.max()) == int(model.other[0]) == step.version
        if step.local_step == args.fail_at:
            raise RuntimeError("told to fail")
        if args.pause:
            time.sleep(args.pause)
print(f"done at {session.global_step} after {session.local_step} local steps: {model.count[0].item():g}", flush=True)
