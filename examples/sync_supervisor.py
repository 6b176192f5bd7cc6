"""MNIST, synchronously: one gradient of every worker makes an update.

One terminal per task, in any order:

  python examples/sync_supervisor.py --job_name=ps --task_id=0 --ps_hosts=localhost:20000 --worker_hosts=localhost:20002,localhost:20003
  python examples/sync_supervisor.py --job_name=worker --task_id=0 --ps_hosts=localhost:20000 --worker_hosts=localhost:20002,localhost:20003
  python examples/sync_supervisor.py --job_name=worker --task_id=1 --ps_hosts=localhost:20000 --worker_hosts=localhost:20002,localhost:20003

or all at once: torchquorum run --ps 1 --workers 2 examples/sync_supervisor.py
"""

import argparse
import time

import mnist_inference
import torch
from torch.nn.functional import cross_entropy

import torchquorum as tq

BATCH_SIZE = 100
LEARNING_RATE_BASE = 0.01
LEARNING_RATE_DECAY = 0.99
REGULARIZATION_RATE = 0.0001
TRAINING_STEPS = 10000

MODEL_SAVE_PATH = "./mnist_model/"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--job_name", default="worker", help='"ps" or "worker"')
parser.add_argument(
    "--ps_hosts",
    default="localhost:20000,localhost:20001",
    help="Comma-separated list of host:port for the parameter server job. eg: localhost:20000,localhost:20001",
)
parser.add_argument(
    "--worker_hosts",
    default="localhost:20003,localhost:20004",
    help="Comma-separated list of host:port for the worker job. eg: localhost:20003,localhost:20004",
)
parser.add_argument("--task_id", type=int, default=0, help="Task ID of the worker/replica running the train")
# What the tutorial has as constants.
parser.add_argument("--training_steps", type=int, default=TRAINING_STEPS, help="global steps (default: %(default)s)")
parser.add_argument("--model_save_path", default=MODEL_SAVE_PATH, help="folder of the model (default: %(default)s)")
parser.add_argument("--data_path", help="folder with the MNIST files (default: those in torchquorum)")


def build_model(n_workers: int) -> tuple[torch.nn.Module, tq.Optimizer]:
    model = mnist_inference.Inference()
    optimizer = tq.Optimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE_BASE),
        rule=tq.Sync(aggregate=n_workers),  # the difference to asynchronous training; how many gradients make an update
        schedule=tq.ExponentialDecay(decay_steps=60000 / BATCH_SIZE, decay_rate=LEARNING_RATE_DECAY),
    )
    return model, optimizer


def main() -> None:
    task = tq.join(parser=parser)  # a ps serves here until the run is over
    mnist = tq.data.load_mnist(task.flags.data_path)
    # Every worker goes through all images in an order of its own, as each with its own next_batch.
    batches = tq.Batches(mnist.train, BATCH_SIZE, worker=task.index, workers=task.num_workers, share="own")
    model, optimizer = build_model(task.num_workers)
    regularizer = tq.tensorflow.l2_regularizer(REGULARIZATION_RATE)
    # The chief creates the variables, saves the model and writes the summaries; the others wait until it has begun.
    with tq.Session(
        task,
        model,
        optimizer,
        logdir=task.flags.model_save_path,
        last_step=task.flags.training_steps,
        save_every_s=60,
        data=batches,
        hooks=[tq.SummaryHook(every_s=60, example=torch.zeros(BATCH_SIZE, mnist_inference.INPUT_NODE))],
    ) as session:
        start_time = time.time()
        while not session.should_stop():
            xs, ys = next(batches)
            loss = cross_entropy(model(xs), ys) + regularizer(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss=loss)
            step = optimizer.last
            if step.local_step % 100 == 0:
                # A global step is an update of n_workers gradients; a worker that is alone gives all of them itself.
                sec_per_batch = (time.time() - start_time) / max(1, step.version)
                format_str = "After %d training steps (%d global step), loss on training batch is %g. (%.3f sec/batch)"
                print(format_str % (step.local_step, step.version, loss.item(), sec_per_batch), flush=True)


if __name__ == "__main__":
    main()
