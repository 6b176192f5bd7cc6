"""Trains a model of clicks without an end, for `server.py` beside it to read.

torchquorum run --workers 2 examples/serving/train.py --logdir runs/serving
python examples/serving/server.py localhost:PORT      # the address that ps task 0 prints, or runs/serving
"""

import argparse

import torch
from clicks import Clicks, read_clicks
from torch import nn

import torchquorum as tq

task = tq.join()
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--logdir", default="runs/serving")
parser.add_argument("--steps", type=int, default=1_000_000, help="global steps")
args = parser.parse_args()

torch.manual_seed(0)
model, loss_fn = Clicks(), nn.BCEWithLogitsLoss()
optimizer = tq.Optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05), rule=tq.Async())
with tq.Session(task, model, optimizer, logdir=args.logdir, last_step=args.steps, hooks=[tq.LogHook(500)]) as session:
    generator = torch.Generator().manual_seed(task.index)
    while not session.should_stop():
        users, items, clicked = read_clicks(256, generator)
        optimizer.zero_grad()
        loss_fn(model(users, items), clicked).backward()
        optimizer.step()
