"""A program that goes through epochs of a DataLoader and waits at barriers, to be recorded and replayed."""

import argparse
import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq
from torchquorum.rules import parse_rule

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--rule", default="async")
parser.add_argument("--logdir")
parser.add_argument("--record", action="store_true", default=None)
flags = parser.parse_args()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.ReLU(), nn.Linear(12, 1))
inner = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = tq.Optimizer(inner, parse_rule(flags.rule, task.num_workers))
x = torch.randn(90, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=4, sampler=tq.data.Sampler(data, task))
torch.manual_seed(5 + task.index)
with tq.Session(
    task, model, optimizer, logdir=flags.logdir, save_every_steps=9, record=flags.record, wait_for_workers=2
) as session:
    session.barrier()
    for _epoch in session.epochs(3):
        for inputs, targets in loader:
            time.sleep(0.01 * random.random())
            loss = ((model(inputs) - targets) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss=loss)
    session.barrier()
print("done", flush=True)
