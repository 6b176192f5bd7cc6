"""A user's program whose buffer counts the batches that its model has seen; it is larger than a door lets through."""

import argparse
import time

import torch
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.worker.client import Patience

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--rule", default="sync")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--buffers", default="chief")
parser.add_argument("--logdir")
parser.add_argument("--save-steps", type=int)
parser.add_argument("--afresh", action="store_true")
args = parser.parse_args()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))
        self.tied = self.weight
        self.register_buffer("seen", torch.zeros(100_000, dtype=torch.float64))
        self.seen: torch.Tensor

    def forward(self) -> torch.Tensor:
        self.seen.add_(1)
        return -self.weight.sum()


model = Counter()
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=parse_rule(args.rule))
with tq.Session(
    task,
    model,
    optimizer,
    last_step=args.steps,
    logdir=args.logdir,
    save_every_steps=args.save_steps,
    start_afresh=args.afresh,
    buffers=args.buffers,
    patience=Patience(start_s=60.0, round_s=60.0, silence_s=10.0, probe_s=0.2, say_s=5.0),
) as session:
    print(f"started at {session.global_step} having seen {model.seen[0].item():g}", flush=True)
    while not session.should_stop():
        optimizer.zero_grad()
        model().backward()
        step = optimizer.step()
        assert bool((model.seen == model.seen[0]).all())
        if task.num_workers == 1:  # then every batch is an update, also after a recovery
            assert model.seen[0].item() == step.version, (model.seen[0].item(), step)
        print(f"local {step.local_step} global {step.version} seen {model.seen[0].item():g}", flush=True)
        time.sleep(args.pause)
    with session.shared_buffers():
        print(f"the run has seen {model.seen[0].item():g}", flush=True)
print(f"done at {session.global_step} having seen {model.seen[0].item():g}", flush=True)
