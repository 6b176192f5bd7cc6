"""A user's program that does not come back to its session: it sleeps in code of its own, or its loop never asks `should_stop`."""

import argparse
import time

import torch
from torch import nn

import torchquorum as tq

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--logdir")
parser.add_argument("--where", choices=["sleep", "loop"])
parser.add_argument("--last-step", type=int)
args = parser.parse_args()

model = nn.Linear(4, 2)
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
with tq.Session(task, model, optimizer, logdir=args.logdir, last_step=args.last_step) as session:
    while session.local_step < 4 or args.where == "loop":
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if session.local_step == 4 or args.last_step == session.global_step:
            print("goes on", flush=True)
        time.sleep(0.01)
    time.sleep(1000)
