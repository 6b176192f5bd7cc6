"""Muon for the matrices, AdamW for the rest: a small network that learns digits.

    python examples/muon/train.py --plain                         # plain PyTorch
    python examples/muon/train.py                                 # the same bits, alone with a ps in this process
    torchquorum run --workers 2 examples/muon/train.py            # two workers: twice the batch

Two optimizers in one session, stepped one after the other; each has its schedule. Needs torch 2.9 or newer, for torch.optim.Muon.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchquorum as tq
from torchquorum.data import load_mnist

BATCH = 50


def main() -> None:
    """Trains, and prints what can be compared at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="global steps of the run (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="train without torchquorum")
    task = tq.join(parser=parser)  # a ps serves here until the run is over
    args = task.flags

    mnist = load_mnist()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    head = set(model[-1].parameters())
    matrices = [p for p in model.parameters() if p.ndim == 2 and p not in head]
    others = [p for p in model.parameters() if p.ndim < 2 or p in head]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95)),
    ]
    run = nullcontext()
    if not args.plain:
        ours = [tq.Optimizer(o, rule=tq.Sync(), name=type(o).__name__) for o in optimizers]
        optimizers = [*ours]
        run = tq.Session(task, model, ours, last_step=args.steps)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=args.steps) for o in optimizers]
    generator = torch.Generator().manual_seed(task.index)
    loss = torch.zeros(())

    with run as session:
        for _ in range(args.steps):
            if session is not None and session.should_stop():
                break
            rows = torch.randint(len(mnist.train), (BATCH,), generator=generator)
            loss = cross_entropy(model(mnist.train.inputs(rows)), mnist.train.labels[rows])
            model.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
    weights = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print(f"loss at last {loss.item():.6f}, weights {weights!r}", flush=True)


if __name__ == "__main__":
    main()
