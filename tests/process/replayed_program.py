"""A program that draws random numbers of every kind, to be recorded and replayed."""

import argparse
import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.wire.rpc import Patience

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--rule", default="async")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--optimizer", default="Adam")
parser.add_argument("--save-steps", type=int, default=15)
parser.add_argument("--durable", default="")
parser.add_argument("--load", type=int, default=-1, help="all load their optimizer's state before that local step")
parser.add_argument("--logdir")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--buffers", default="chief")
parser.add_argument("--compress", default="")
parser.add_argument("--shared", action="store_true", help="ps task 0 hands the batches out")
parser.add_argument("--record", action="store_true", default=None)
flags = parser.parse_args()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.ReLU(), nn.Linear(12, 1))
inner = getattr(torch.optim, flags.optimizer)(model.parameters(), lr=0.01)
optimizer = tq.Optimizer(inner, parse_rule(flags.rule, task.num_workers), compress=flags.compress or None)
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
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=8, shuffle=True)


def train() -> None:
    with tq.Session(
        task,
        model,
        optimizer,
        logdir=flags.logdir,
        last_step=None if flags.shared else flags.steps,
        save_every_steps=flags.save_steps,
        durable=flags.durable or None,
        buffers=flags.buffers,
        record=flags.record,
        liveness_s=2.0,
        patience=Patience(silence_s=3.0),
        start_afresh=True,
    ) as session:
        print(f"begins at {session.global_step}", flush=True)
        while True:
            batches = session.share(data, batch_size=2, epochs=flags.steps // 32 + 1) if flags.shared else loader
            for inputs, targets in batches:
                if session.should_stop():
                    return
                if session.local_step + 1 == flags.load:
                    optimizer.load_state_dict(optimizer.state_dict())
                time.sleep(flags.pause * random.random())
                noise = random.random() + float(np.random.rand())
                loss = ((model(inputs + noise) - targets) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step(loss=loss)
                scheduler.step()
            if flags.shared:
                return


train()
print("done", flush=True)
