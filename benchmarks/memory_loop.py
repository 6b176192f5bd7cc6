"""A task whose worker pushes ready-made gradients for ever: what its ps holds is looked at from outside.

Arguments: numbers in the model, optimizer, rule, and `average` for moving averages. Says `at work` after some steps.
"""

import sys

import torch
from pushers import make_model

import torchquorum as tq
from torchquorum.rules import parse_rule

task = tq.join()
numel, name, rule, *more = sys.argv[1:]
torch.set_num_threads(1)
model = make_model(int(numel))
for parameter in model.parameters():
    parameter.grad = torch.full_like(parameter, 1e-6)
optimizer = tq.Optimizer(
    getattr(torch.optim, name)(model.parameters(), lr=1e-3),
    rule=parse_rule(rule),
    average=tq.ExponentialMovingAverage(0.99) if more else None,
)
with tq.Session(task, model, optimizer, max_seconds=300) as session:
    while not session.should_stop():
        optimizer.step()
        if optimizer.last.local_step == 30:
            print("at work", flush=True)
