"""An epoch classifier over a DataLoader: torchquorum run --workers 2 examples/epochs/train.py."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq
from torchquorum.data import load_mnist
from torchquorum.jobs.models import MLP, evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the run (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=6000, help="images of an epoch (default: %(default)s)")
    parser.add_argument("--logdir", default="runs/epochs", help="the run's folder (default: %(default)s)")
    task = tq.join(parser=parser)
    args = task.flags

    torch.manual_seed(0)
    mnist = load_mnist()
    rows = torch.arange(min(args.rows, len(mnist.train.labels)))
    dataset = TensorDataset(mnist.train.inputs(rows), mnist.train.labels[rows])
    loader = DataLoader(dataset, batch_size=50, sampler=tq.data.Sampler(dataset, task))
    model = MLP()
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rule=tq.Sync())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    with tq.Session(task, model, optimizer, logdir=args.logdir, data=scheduler) as session:
        for epoch in session.epochs(args.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step(loss=loss)
            scheduler.step()
            if task.is_chief:  # the model holds the version that all workers have made of the epoch
                _, accuracy = evaluate(model, mnist.test)
                print(f"epoch {epoch}: step {session.global_step}, test accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
