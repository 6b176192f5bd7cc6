"""A user's program that ends badly: it raises at a local step, or its schedule fails at an update."""

import argparse
import time

import torch
from torch import nn

import torchquorum as tq

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--logdir")
parser.add_argument("--raises", type=int, default=-1, help="the worker that raises")
parser.add_argument("--error", default="ValueError")
parser.add_argument("--schedule-ends", type=int, help="the update after which the schedule fails")
parser.add_argument("--last-step", type=int, default=60)
args = parser.parse_args()

model = nn.Linear(4, 2)
ends = args.schedule_ends
schedule = tq.schedule("OneCycleLR", max_lr=0.1, total_steps=ends) if ends else None
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=tq.Async(), schedule=schedule)
all_in = task.num_workers if args.raises >= 0 else None  # or the others may be done before it has come
with tq.Session(
    task,
    model,
    optimizer,
    logdir=args.logdir,
    last_step=args.last_step,
    save_every_steps=10,
    wait_for_workers=all_in,
) as session:
    while not session.should_stop():
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)
        if task.index == args.raises and session.local_step == 10:
            raise {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}[args.error]("boom")
print(f"finished at {session.global_step}", flush=True)
