"""MNIST in plain PyTorch, one process. Read it beside train_quorum.py: the difference is what torchquorum costs."""

import argparse

import torch

from torchquorum import Batches
from torchquorum.data import load_mnist
from torchquorum.jobs.models import MLP, evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000, help="updates of the model (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=100, help="images in a batch (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate (default: %(default)s)")
    parser.add_argument("--data", metavar="DIR", help="folder with MNIST idx files (default: those in torchquorum)")
    args = parser.parse_args()

    mnist = load_mnist(args.data)
    batches = Batches(mnist.train, args.batch_size)
    model = MLP()
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    for step in range(1, args.steps + 1):
        x, y = next(batches)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if batches.step_in_epoch % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)

    _, accuracy = evaluate(model, mnist.test)
    print(f"test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
