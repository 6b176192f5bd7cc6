"""MNIST from input queues, synchronously or asynchronously by a flag, with the accuracy of the average model every 100 steps.

One terminal per task, in any order, here synchronously:

  python examples/issync.py --ps_hosts=localhost:2222 --worker_hosts=localhost:2223,localhost:2224 --job_name=ps --task_index=0 --issync=1
  python examples/issync.py --ps_hosts=localhost:2222 --worker_hosts=localhost:2223,localhost:2224 --job_name=worker --task_index=0 --issync=1
  python examples/issync.py --ps_hosts=localhost:2222 --worker_hosts=localhost:2223,localhost:2224 --job_name=worker --task_index=1 --issync=1

or all at once: torchquorum run --ps 1 --workers 2 examples/issync.py --issync=1
"""  # noqa: E501

import argparse
import itertools
import tempfile
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchquorum as tq
from torchquorum.data import Split

BATCH_SIZE = 128
LEARNING_RATE = 0.01
TRAINING_STEPS = 60000
TEST_EPOCHS = 50
MOVING_AVERAGE_DECAY = 0.99

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ps_hosts", help="Comma-separated list of hostname:port pairs")
parser.add_argument("--worker_hosts", help="Comma-separated list of hostname:port pairs")
parser.add_argument("--job_name", help="job name: worker or ps")
parser.add_argument("--task_index", type=int, help="Index of task within the job")
parser.add_argument(
    "--issync",
    type=int,
    choices=(0, 1),
    help="是否采用分布式的同步模式，1表示同步模式，0表示异步模式 (1: synchronous, 0: asynchronous, the default)",  # noqa: RUF001
)
# What the tutorial has as constants.
parser.add_argument("--training_steps", type=int, default=TRAINING_STEPS, help="local steps (default: %(default)s)")
parser.add_argument("--train_dir", help="folder of the model (default: a new temporary one)")
parser.add_argument("--data_path", help="folder with the MNIST files (default: those in torchquorum)")


def get_batch(split: Split, task: tq.Task, num_epochs: int | None = None) -> tq.data.Prefetcher:
    """A queue of batches that a thread of its own fills; without a number of epochs it never ends."""
    batches = tq.Batches(split, BATCH_SIZE, worker=task.index, workers=task.num_workers, share="own")
    if num_epochs is None:
        return tq.data.Prefetcher(batches)
    return tq.data.Prefetcher(itertools.islice(batches, num_epochs * batches.steps_per_epoch))


def main() -> None:
    task = tq.join(parser=parser)  # a ps serves here until the run is over
    flags = task.flags
    mnist = tq.data.load_mnist(flags.data_path)
    train_queue, test_queue = get_batch(mnist.train, task), get_batch(mnist.test, task, TEST_EPOCHS)
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = tq.Optimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        rule=tq.Sync() if flags.issync == 1 else tq.Async(),
        average=tq.ExponentialMovingAverage(MOVING_AVERAGE_DECAY),
    )
    train_dir = flags.train_dir or tempfile.mkdtemp()  # of these the chief's counts

    if task.is_chief:
        print(f"Worker {task.index}: Initailizing session...", flush=True)
    else:
        print(f"Worker {task.index}: Waiting for session to be initaialized...", flush=True)
    with (
        tq.tensorflow.Coordinator() as coord,  # ends the threads of both queues when the block does, or when one of them fails
        tq.Session(task, model, optimizer, logdir=train_dir) as session,
    ):
        print(f"Worker {task.index}: Session initialization  complete.", flush=True)
        print(f"Traing begins @ {time.time():f}", flush=True)
        coord.run([train_queue, test_queue])
        while session.local_step < flags.training_steps and not session.should_stop():
            x, y = next(train_queue)
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss=loss)
            step = optimizer.last
            count = f"traing step {step.local_step} dome (global step:{step.version})"
            print(f"{time.time():f}: Worker {task.index}: {count}", flush=True)
            if step.local_step % 100 == 0:
                x, y = next(test_queue)
                with session.averaged() as version, torch.no_grad():
                    accuracy = (model(x).argmax(dim=1) == y).float().mean().item()
                result = f"validation accuracy using average model is {accuracy:g}."
                print(f"After {version} training step(s),{result}", flush=True)


if __name__ == "__main__":
    main()
