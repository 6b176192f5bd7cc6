"""A user's program with an evaluation, run as ps, chief and evaluator alike: the parameter equals the version, so that
every accuracy that is printed is the step of the checkpoint it was found in.
"""

import sys

import torch
from torch import nn

import torchquorum as tq

task = tq.join()
model = nn.Linear(1, 1, bias=False)
with torch.no_grad():
    model.weight.zero_()
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), average=tq.ExponentialMovingAverage(0.0))


def evaluate(module: nn.Module) -> float:
    return float(next(module.parameters()))


hooks = [tq.EvaluateHook(10**6, evaluate), tq.hooks.FinalAccuracyHook(evaluate)]
with tq.Session(
    task, model, optimizer, logdir=sys.argv[1], last_step=30, save_every_steps=10, keep=50, hooks=hooks
) as session:
    while True:  # asks only afterwards whether to stop, as many programs do
        model.weight.grad = -torch.ones_like(model.weight)
        optimizer.step()
        if session.should_stop():
            break
print(f"done at {session.global_step}: {model.weight.item():g}", flush=True)
