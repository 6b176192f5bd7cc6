"""MNIST, synchronously, with a stop hook and moving averages of the variables; stale gradients are refused and counted.

An update is the mean of two gradients, if there are two workers. Before the second one has come, the first gives both, so
the global step is half of its local step. A gradient that was not computed from the newest variables is refused.

One terminal per task, in any order:

  python examples/sync_monitored.py --job_name=ps --task_id=0 --ps_hosts=localhost:2222 --worker_hosts=localhost:2223,localhost:2224
  python examples/sync_monitored.py --job_name=worker --task_id=0 --ps_hosts=localhost:2222 --worker_hosts=localhost:2223,localhost:2224
  python examples/sync_monitored.py --job_name=worker --task_id=1 --ps_hosts=localhost:2222 --worker_hosts=localhost:2223,localhost:2224

or all at once: torchquorum run --ps 1 --workers 2 examples/sync_monitored.py
"""

import argparse
import time
from collections import Counter

import mnist_inference
import torch
from torch.nn.functional import cross_entropy

import torchquorum as tq

BATCH_SIZE = 100
LEARNING_RATE_BASE = 0.001
LEARNING_RATE_DECAY = 0.99
REGULARIZATION_RATE = 0.0001
TRAINING_STEPS = 20000
MOVING_AVERAGE_DECAY = 0.99

MODEL_SAVE_PATH = "./log2"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--job_name", default="worker", help=' "ps" or "worker" ')
parser.add_argument(
    "--ps_hosts",
    default=" tf-ps0:2222, tf-ps1:1111",
    help='Comma-separated list of hostname:port for the parameter server jobs. e.g. "tf-ps0:2222,tf-ps1:1111" ',
)
parser.add_argument(
    "--worker_hosts",
    default=" tf-worker0:2222, tf-worker1:1111",
    help='Comma-separated list of hostname:port for the worker jobs. e.g. "tf-worker0:2222,tf-worker1:1111" ',
)
parser.add_argument("--task_id", type=int, default=0, help="Task ID of the worker/replica running the training.")
# What the tutorial has as constants.
parser.add_argument("--training_steps", type=int, default=TRAINING_STEPS, help="global steps (default: %(default)s)")
parser.add_argument("--replicas_to_aggregate", type=int, help="gradients that make an update (default: one per worker)")
parser.add_argument("--model_save_path", default=MODEL_SAVE_PATH, help="folder of the model (default: %(default)s)")
parser.add_argument("--data_path", help="folder with the MNIST files (default: those in torchquorum)")


def build_model(replicas_to_aggregate: int) -> tuple[torch.nn.Module, tq.Optimizer]:
    model = mnist_inference.Inference()
    optimizer = tq.Optimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE_BASE),
        rule=tq.Sync(aggregate=replicas_to_aggregate),
        schedule=tq.ExponentialDecay(decay_steps=60000 / BATCH_SIZE, decay_rate=LEARNING_RATE_DECAY),
        # The averages lie on the ps beside the variables and follow every update, not only those of the chief.
        average=tq.ExponentialMovingAverage(MOVING_AVERAGE_DECAY),
    )
    return model, optimizer


def main() -> None:
    task = tq.join(parser=parser)  # a ps serves here until the run is over
    mnist = tq.data.load_mnist(task.flags.data_path)
    batches = tq.Batches(mnist.train, BATCH_SIZE, worker=task.index, workers=task.num_workers, share="own")
    model, optimizer = build_model(task.flags.replicas_to_aggregate or task.num_workers)
    regularizer = tq.tensorflow.l2_regularizer(REGULARIZATION_RATE)
    hooks = [tq.StopAtStepHook(last_step=task.flags.training_steps), tq.SummaryHook()]
    # The session initialises the variables or takes them from a checkpoint, writes the log and saves the model.
    with tq.Session(
        task, model, optimizer, logdir=task.flags.model_save_path, hooks=hooks, save_every_s=60, data=batches
    ) as session:
        print("session started.", flush=True)
        refused = Counter[str]()
        start_time = time.time()
        while not session.should_stop():
            xs, ys = next(batches)
            loss = cross_entropy(model(xs), ys) + regularizer(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss=loss)
            step = optimizer.last
            if not step.accepted:
                refused[step.reason] += 1
            if step.local_step % 100 == 0:
                sec_per_batch = (time.time() - start_time) / max(1, step.version)
                format_str = "After %d training steps (%d global steps), loss on training batch is %g. (%.3f sec/batch)"
                print(format_str % (step.local_step, step.version, loss.item(), sec_per_batch), flush=True)
    reasons = "".join(f", {count} {reason}" for reason, count in sorted(refused.items()))
    print(f"worker {task.index}: {session.local_step} gradients, {refused.total()} refused{reasons}", flush=True)


if __name__ == "__main__":
    main()
