"""A user's program whose variables count how often each batch is in them: for runs whose workers come and go.

Element n of the one parameter is for row n of the data; a batch is one row. Its gradient is minus the quorum there, and the
learning rate 1, so after an update with it that element has grown by exactly 1. Until the file --go is there, a worker that
gets a batch of number --hold or more keeps it, unless it is asked to leave.
"""

import os
import time
from pathlib import Path

import torch
from run_flags import make_parser, make_session
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule

task = tq.join()
parser = make_parser()
parser.set_defaults(steps=None, liveness=2.0, silence=3.0)
parser.add_argument("--rows", type=int, default=60)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--hold", type=int, default=10**9)
parser.add_argument("--go", type=Path, default=Path())
args = parser.parse_args()

model = nn.Module()
model.uses = nn.Parameter(torch.zeros(args.rows))
rule = parse_rule(args.rule)
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=rule)
with make_session(args, task, model, optimizer) as session:
    print(f"pid {os.getpid()} of worker {task.index} at {session.global_step}", flush=True)
    share = session.share(torch.arange(args.rows), 1, epochs=args.epochs)
    for row in share:
        if share.number >= args.hold and not args.go.exists():
            print(f"worker {task.index} holds {share.number}", flush=True)
            while not args.go.exists() and not session.should_stop():
                time.sleep(0.01)
        time.sleep(args.pause)
        model.uses.grad = torch.zeros(args.rows).index_fill_(0, row, -float(rule.needed(task.num_workers)))
        optimizer.step()
        step = optimizer.last
        if not step.accepted:
            print(f"worker {task.index}: {share.number} refused: {step.reason}", flush=True)
        elif session.global_step % 10 == 0:
            print(f"worker {task.index} at {session.global_step}", flush=True)
    session.pull()
    least, most = int(model.uses.min()), int(model.uses.max())
print(f"worker {task.index} ends at {session.global_step}: uses {least} to {most}", flush=True)
