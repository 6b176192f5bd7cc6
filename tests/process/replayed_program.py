"""A program that draws random numbers of every kind, to be recorded and replayed."""

import argparse
import os
import random
import signal
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq
from torchquorum.rules.presets import parse_rule

parser = argparse.ArgumentParser()
parser.add_argument("--rule", default="async")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--optimizer", default="Adam")
parser.add_argument("--save-steps", type=int, default=15)
parser.add_argument("--durable", default="")
parser.add_argument(
    "--kill", default="", help="WORKER:STEP,... that worker kills itself in its first life before that local step"
)
parser.add_argument("--load", type=int, default=-1, help="all load their optimizer's state before that local step")
parser.add_argument("--pause", type=float, default=0.0)
flags = parser.parse_known_args()[0]
task = tq.join()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.ReLU(), nn.Linear(12, 1))
inner = getattr(torch.optim, flags.optimizer)(model.parameters(), lr=0.01)
optimizer = tq.Optimizer(inner, parse_rule(flags.rule, task.num_workers))
if flags.load >= 0:  # and it begins with one
    beginning = optimizer.state_dict()
    ones = {"step": torch.tensor(3.0), "exp_avg": 0.1, "exp_avg_sq": 0.2}
    beginning["state"] = {
        i: {name: torch.full_like(p, value) if isinstance(value, float) else value for name, value in ones.items()}
        for i, p in enumerate(model.parameters())
    }
    optimizer.load_state_dict(beginning)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
x = torch.randn(64, 6)
y = x.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
kills = dict(entry.split(":") for entry in flags.kill.split(",") if entry)
first = not os.path.exists(f"{os.environ.get('MARK', '/nowhere')}-{task.index}")
if not first or "TORCHQUORUM_REPLAY" in os.environ:
    kills = {}
elif "MARK" in os.environ:
    open(f"{os.environ['MARK']}-{task.index}", "w").close()


def steps() -> None:
    with tq.Session(
        task, model, optimizer, last_step=flags.steps, save_every_steps=flags.save_steps, durable=flags.durable or None
    ) as session:
        while True:
            for inputs, targets in loader:
                if session.should_stop():
                    return
                if kills.get(str(task.index)) == str(session.local_step + 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                if session.local_step + 1 == flags.load:
                    optimizer.load_state_dict(optimizer.state_dict())
                time.sleep(flags.pause * random.random())
                noise = random.random() + float(np.random.rand())
                loss = ((model(inputs + noise) - targets) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step(loss=loss)
                scheduler.step()


steps()
