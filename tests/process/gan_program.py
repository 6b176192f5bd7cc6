"""A small GAN over epochs, started as real processes by tests: each iteration steps two optimizers, in the order that a flag gives."""

import argparse
import hashlib
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logdir", default=None)
    parser.add_argument(
        "--order", default="dg", choices=["dg", "gd", "dddg", "gdd"], help="who is stepped in an iteration"
    )
    parser.add_argument("--first", default="G", choices=["G", "D"], help="whose updates are the global steps")
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.01)
    task = tq.join(parser=parser)
    args = task.flags

    points = torch.randn(240, 2, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(points)
    loader = DataLoader(dataset, batch_size=6, sampler=tq.data.Sampler(dataset, task))
    torch.manual_seed(1)
    models = {
        "G": nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)),
        "D": nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)),
    }
    optimizers = {
        "G": tq.Optimizer(torch.optim.Adam(models["G"].parameters(), lr=0.01)),
        "D": tq.Optimizer(torch.optim.SGD(models["D"].parameters(), lr=0.05, momentum=0.9)),
    }
    given = {name: optimizers[name] for name in (args.first, "D" if args.first == "G" else "G")}
    loss_of = nn.functional.binary_cross_entropy_with_logits
    torch.manual_seed(10 + task.index)
    with tq.Session(
        task,
        models,
        given,
        logdir=args.logdir,
        save_every_steps=args.save_steps,
        durable=args.durable or None,
        wait_for_workers=task.num_workers,
        liveness_s=20.0,
    ) as session:
        print(f"started at {[o.version for o in optimizers.values()]}", flush=True)
        for epoch in session.epochs(args.epochs):
            for (real,) in loader:
                ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
                for which in args.order:
                    made = models["G"](torch.randn(len(real), 3))
                    optimizers[which.upper()].zero_grad()
                    if which == "g":
                        loss = loss_of(models["D"](made), ones)
                    else:
                        loss = loss_of(models["D"](real), ones) + loss_of(models["D"](made.detach()), zeros)
                    loss.backward()
                    optimizers[which.upper()].step(loss=loss)
                    time.sleep(args.pause)
                print(f"epoch {epoch}: {[o.version for o in optimizers.values()]}", flush=True)
    held = b"".join(p.detach().numpy().tobytes() for model in models.values() for p in model.parameters())
    print(f"ended at {[o.version for o in optimizers.values()]} digest {hashlib.sha1(held).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
