"""A classifier whose learning rate falls when the loss on held-out data stops falling (ReduceLROnPlateau), epoch by epoch.

    python examples/annealing/train_annealing.py --plain              # plain PyTorch
    python examples/annealing/train_annealing.py                      # the same bits, alone with a ps in this process
    torchquorum run --workers 2 examples/annealing/train_annealing.py # each worker has its own batches

All workers run the same lines; the rate that counts is the chief's.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchquorum as tq

FEATURES, CLASSES, ROWS, HELD_OUT, BATCH = 20, 4, 512, 128, 32


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Points around the centre of their class, and some noise in the labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (ROWS + HELD_OUT,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    points = centres[labels] + 1.5 * torch.randn(len(labels), FEATURES, generator=generator)
    return points, labels


def main() -> None:
    """Trains, and prints the rate of every epoch and what can be compared at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--plain", action="store_true", help="train without torchquorum")
    task = tq.join(parser=parser)  # a ps serves here until the run is over
    points, labels = make_data()
    held_out = points[ROWS:], labels[ROWS:]

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = nullcontext()
    if not task.flags.plain:
        optimizer = tq.Optimizer(optimizer, rule=tq.Sync())
        run = tq.Session(task, model, optimizer)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    generator = torch.Generator().manual_seed(task.index)
    loss = float("nan")
    with run as session:
        for epoch in range(task.flags.epochs):
            order = torch.randperm(ROWS, generator=generator)
            for rows in order.split(BATCH):
                if session is not None and session.should_stop():
                    break
                optimizer.zero_grad()
                cross_entropy(model(points[rows]), labels[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                loss = cross_entropy(model(held_out[0]), held_out[1]).item()
            scheduler.step(loss)
            print(f"epoch {epoch}: loss {loss:.4f}, next rate {optimizer.param_groups[0]['lr']:g}", flush=True)
    weights = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print(f"loss at last {loss:.6f}, weights {weights!r}", flush=True)


if __name__ == "__main__":
    main()
