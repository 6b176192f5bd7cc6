"""A run whose every trained element is the number of its version, until a file is there."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import torchquorum as tq

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--logdir")
parser.add_argument("--end", required=True, help="the file")
args = parser.parse_args()

torch.set_num_threads(1)
model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (7, 40_000, 33)])
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
with tq.Session(task, model, optimizer, logdir=args.logdir, save_every_steps=20) as session:
    while not session.should_stop() and not Path(args.end).exists():
        for parameter in model:
            parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
        time.sleep(0.005)
