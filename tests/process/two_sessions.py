"""A program with two sessions, one after the other, and a pause between them in which the ps tasks have nothing to do."""

import sys
import time

import torch
from torch import nn

import torchquorum as tq

task = tq.join()
pause_s, sessions = float(sys.argv[1]), int(sys.argv[2])
for number in range(sessions):
    torch.manual_seed(number)
    model = nn.Linear(3 + number, 2)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with tq.Session(task, model, optimizer, last_step=5 + number, wait_for_workers=task.num_workers) as session:
        while not session.should_stop():
            optimizer.zero_grad()
            model(torch.ones(4, 3 + number)).square().mean().backward()
            optimizer.step()
    print(f"session {number} ended at {session.global_step}", flush=True)
    if task.is_chief or number == 0:
        time.sleep(pause_s)
