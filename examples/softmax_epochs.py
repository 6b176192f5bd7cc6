"""Softmax regression on MNIST, asynchronously, by epochs; every worker prints its own final accuracy.

One terminal per task, in any order:

  python examples/softmax_epochs.py --job_name=ps --task_index=0
  python examples/softmax_epochs.py --job_name=worker --task_index=0
  python examples/softmax_epochs.py --job_name=worker --task_index=1
  python examples/softmax_epochs.py --job_name=worker --task_index=2

or all at once: torchquorum run --ps 1 --workers 3 examples/softmax_epochs.py

Each worker goes through the images n_epochs times at its own pace, so all reach the same local step, and the global step is
the sum of theirs. The accuracies differ, because each worker tests the variables as they are when it is done.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchquorum as tq

N_INPUTS = 784  # total pixels
N_OUTPUTS = 10  # digits 0 to 9
LEARNING_RATE = 0.01
BATCH_SIZE = 100

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--job_name", help='"ps" or "worker"')
parser.add_argument("--task_index", type=int, help="the task's place in the list of its job")
parser.add_argument("--ps_hosts", default="localhost:9001", help="host:port of the ps tasks (default: %(default)s)")
parser.add_argument(
    "--worker_hosts",
    default="localhost:9002,localhost:9003,localhost:9004",
    help="host:port of the workers (default: %(default)s)",
)
parser.add_argument("--n_epochs", type=int, default=50, help="epochs of each worker (default: %(default)s)")
parser.add_argument("--n_epochs_print", type=int, default=10, help="epochs between two lines (default: %(default)s)")
parser.add_argument("--gpu_memory_fraction", type=float, default=0.2, help="of a GPU, if any (default: %(default)s)")
parser.add_argument("--data_path", help="folder with the MNIST files (default: those in torchquorum)")


def main() -> None:
    task = tq.join(parser=parser)  # a ps serves here until the run is over
    flags = task.flags
    if flags.n_epochs < 1 or flags.n_epochs_print < 1:
        parser.error("--n_epochs and --n_epochs_print must be 1 or more")
    mnist = tq.data.load_mnist(flags.data_path)
    batches = tq.Batches(mnist.train, BATCH_SIZE, worker=task.index, workers=task.num_workers, share="own")

    model = nn.Linear(N_INPUTS, N_OUTPUTS)
    nn.init.normal_(model.weight)
    nn.init.normal_(model.bias)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), rule=tq.Async())

    fraction = flags.gpu_memory_fraction if torch.cuda.is_available() else None
    with tq.Session(task, model, optimizer, gpu_memory_fraction=fraction) as session:
        while batches.epoch < flags.n_epochs and not session.should_stop():
            x_batch, y_batch = next(batches)
            loss = cross_entropy(model(x_batch), y_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss=loss)
            epoch_is_over = batches.step_in_epoch == 0
            if epoch_is_over and batches.epoch % flags.n_epochs_print == 0:
                line = "worker={},epoch={},global_step={}, local_step={}, loss = {}"
                counts = batches.epoch - 1, session.global_step, session.local_step
                print(line.format(task.index, *counts, loss.item()), flush=True)

        session.pull()  # the newest variables, with what the others have done meanwhile
        x_test, y_test = mnist.test.tensors()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(dim=1) == y_test).float().mean().item()
        print(f"worker={task.index}, final accuracy = {accuracy}", flush=True)
        session.record(accuracy=accuracy)


if __name__ == "__main__":
    main()
