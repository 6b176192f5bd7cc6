"""A GAN, with an optimizer for each of its two models.

    python examples/gan/train.py --plain                          # plain PyTorch
    python examples/gan/train.py                                  # the same bits, alone with a ps in this process
    torchquorum run --workers 2 examples/gan/train.py             # each worker has its part of the images

One session has both optimizers: each has its own updates, so no gradient of the one is averaged with one of the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq
from torchquorum.data import load_mnist

LATENT, PIXELS, BATCH = 16, 784, 50


def make_models() -> tuple[nn.Module, nn.Module]:
    """Returns a generator and a discriminator."""
    generator = nn.Sequential(
        nn.Linear(LATENT, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, PIXELS), nn.Sigmoid()
    )
    discriminator = nn.Sequential(nn.Linear(PIXELS, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    return generator, discriminator


def main() -> None:
    """Trains, and prints the losses of every epoch and what can be compared at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the run (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=2000, help="images of an epoch (default: %(default)s)")
    parser.add_argument("--logdir", help="the run's folder, for checkpoints and the report")
    parser.add_argument("--plain", action="store_true", help="train without torchquorum")
    task = tq.join(parser=parser)  # a ps serves here until the run is over
    args = task.flags

    rows = torch.arange(args.rows)
    dataset = TensorDataset(load_mnist().train.inputs(rows))
    sampler = tq.data.Sampler(dataset, task)
    loader = DataLoader(dataset, BATCH, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    generator, discriminator = make_models()
    optimizer_g: torch.optim.Optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d: torch.optim.Optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    run = nullcontext()
    if not args.plain:
        optimizer_g, optimizer_d = tq.Optimizer(optimizer_g, rule=tq.Sync()), tq.Optimizer(optimizer_d, rule=tq.Sync())
        models = {"generator": generator, "discriminator": discriminator}
        run = tq.Session(task, models, {"G": optimizer_g, "D": optimizer_d}, logdir=args.logdir)
    torch.manual_seed(1 + task.index)  # each worker its own noise
    loss_of = nn.BCEWithLogitsLoss()
    real, fake = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    loss_g = loss_d = torch.zeros(())

    with run as session:
        epochs: Iterable[int] = range(args.epochs) if session is None else session.epochs(args.epochs)
        for epoch in epochs:
            sampler.set_epoch(epoch)  # session.epochs() has done so
            for (images,) in loader:
                made = generator(torch.randn(BATCH, LATENT))

                optimizer_d.zero_grad()
                loss_d = (loss_of(discriminator(images), real) + loss_of(discriminator(made.detach()), fake)) / 2
                loss_d.backward()
                optimizer_d.step()

                optimizer_g.zero_grad()
                loss_g = loss_of(discriminator(made), real)
                loss_g.backward()
                optimizer_g.step()
            step = "" if session is None else f"step {session.global_step}, "
            print(f"epoch {epoch}: {step}loss of G {loss_g.item():.4f}, of D {loss_d.item():.4f}", flush=True)
    weights = sum(
        p.detach().double().abs().sum().item() for p in (*generator.parameters(), *discriminator.parameters())
    )
    print(f"loss at last {loss_d.item():.6f}, weights {weights!r}", flush=True)


if __name__ == "__main__":
    main()
