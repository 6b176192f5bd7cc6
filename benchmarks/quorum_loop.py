"""The same trainer as a task of torchquorum: prints the worker's batches per second. Arguments: rule, seconds."""

import sys
import time

import torch
from work import WARM_UP, load, loss_of, make_model

import torchquorum as tq
from torchquorum.rules import parse_rule

task = tq.join()
rule, seconds = sys.argv[1], float(sys.argv[2])
torch.set_num_threads(1)
images, labels = load()
model = make_model()
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule=parse_rule(rule))
with tq.Session(task, model, optimizer) as session:
    start = 0.0
    for step in range(10**9):
        if step == WARM_UP:
            start = time.perf_counter()
        loss = loss_of(model, images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step > WARM_UP and step % 50 == 0 and time.perf_counter() - start > seconds:
            break
    rate = (step + 1 - WARM_UP) / (time.perf_counter() - start)
print(f"rate {rate:.3f}", flush=True)
