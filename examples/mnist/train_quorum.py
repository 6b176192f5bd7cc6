"""MNIST with torchquorum, any number of ps and workers. Read it beside train_torch.py, the same in plain PyTorch."""

import argparse

import torch

import torchquorum as tq
from torchquorum.data import load_mnist
from torchquorum.jobs.models import MLP, evaluate


def main() -> None:
    task = tq.join()  # a ps serves here until the job ends; join takes its own flags, the rest are ours
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000, help="updates of the model (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=100, help="images in a batch (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate (default: %(default)s)")
    parser.add_argument("--data", metavar="DIR", help="folder with MNIST idx files (default: those in torchquorum)")
    parser.add_argument("--logdir", default="runs/mnist", help="the run's folder (default: %(default)s)")
    args = parser.parse_args()

    mnist = load_mnist(args.data)
    batches = tq.Batches(mnist.train, args.batch_size, worker=task.index, workers=task.num_workers)
    model = MLP()
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=args.lr), rule=tq.Sync())

    hooks = [tq.SummaryHook()]  # what TensorBoard shows
    with tq.Session(
        task, model, optimizer, logdir=args.logdir, last_step=args.steps, data=batches, hooks=hooks
    ) as session:
        while not session.should_stop():
            x, y = next(batches)
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss=loss)  # push the gradients, pull the variables
            if batches.step_in_epoch % 100 == 0:
                print(f"worker {task.index}  step {session.global_step:5d}  loss {loss.item():.4f}", flush=True)

    if task.is_chief:
        _, accuracy = evaluate(model, mnist.test)
        print(f"test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
