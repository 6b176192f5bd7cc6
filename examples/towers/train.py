"""The tutorials' multi-GPU program: one worker, a tower per GPU, a batch per tower, one update with the mean gradient.

Without GPUs the towers share the CPU. Alone it needs no cluster; started by `torchquorum run --workers 2
examples/towers/train.py` it is a worker with towers.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import torchquorum as tq

sys.path.insert(0, str(Path(__file__).parents[1]))
import mnist_inference  # the network of the tutorials, one folder up


def get_input(task: tq.Task, args: argparse.Namespace) -> tuple[tq.data.TFRecordDataset | tq.Batches, Iterator[Any]]:
    """Returns this worker's data, whose position is saved, and its batches: images of 784 bytes, and labels."""
    if args.data_path is None:
        train = tq.data.load_mnist().train
        batches = tq.Batches((train.images, train.labels), args.batch_size, worker=task.index, workers=task.num_workers)
        return batches, batches
    dataset = tq.data.TFRecordDataset(
        args.data_path,
        features={
            "image_raw": tq.data.RawFeature([784], torch.uint8),
            "label": tq.data.FixedLenFeature([], torch.int64),
        },
        transform=lambda batch: (batch["image_raw"], batch["label"]),
        shuffle=10_000,
        repeat=10,
        batch_size=args.batch_size,
        prefetch=4,
        share=(task.index, task.num_workers),
    )
    return dataset, iter(dataset)


def get_loss(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(images.float()), labels)  # not scaled, as in the tutorials


def accuracy(model: torch.nn.Module) -> float:
    test = tq.data.load_mnist().test
    device = next(model.parameters()).device
    with torch.no_grad():
        return (model(test.images.to(device).float()).argmax(1) == test.labels.to(device)).float().mean().item()


def main() -> None:
    task = tq.join()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n_gpu", type=int, default=2, help="towers (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=100, help="images in a tower's batch (default: %(default)s)")
    parser.add_argument("--learning_rate_base", type=float, default=0.001, help="default: %(default)s")
    parser.add_argument("--learning_rate_decay", type=float, default=0.99, help="default: %(default)s")
    parser.add_argument("--regularization_rate", type=float, default=0.0001, help="default: %(default)s")
    parser.add_argument("--training_steps", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--moving_average_decay", type=float, default=0.99, help="default: %(default)s")
    parser.add_argument("--model_save_path", default="logs_and_models", help="default: %(default)s")
    parser.add_argument(
        "--data_path",
        metavar="FILE",
        help="TFRecords, such as the output.tfrecords of `torchquorum data tfrecord` (default: the MNIST in torchquorum)",
    )
    args = parser.parse_args()

    data, batches = get_input(task, args)
    model = mnist_inference.Inference()
    towers = tq.Towers(model, num_towers=args.n_gpu)  # on the GPUs that there are, or on the CPU
    optimizer = tq.Optimizer(
        torch.optim.SGD(model.parameters(), lr=args.learning_rate_base),
        schedule=tq.ExponentialDecay(decay_steps=60000 / args.batch_size, decay_rate=args.learning_rate_decay),
        average=tq.ExponentialMovingAverage(args.moving_average_decay),
    )
    regularizer = tq.tensorflow.l2_regularizer(args.regularization_rate)
    hooks = [
        tq.hooks.TowerLogHook(towers, every=10),
        # Histograms at each of these steps, under the tutorial's names.
        tq.SummaryHook(
            every_steps=10,
            batch_size=args.batch_size * args.n_gpu,
            histograms="always",
            variable_tag="{}",
            gradient_tag="gradients_on_average/{}",
        ),
    ]

    with tq.Session(
        task,
        model,
        optimizer,
        logdir=args.model_save_path,
        last_step=args.training_steps,
        save_every_steps=1000,
        data=data,
        hooks=hooks,
        log_device_placement=True,
        allow_soft_placement=True,
    ) as session:
        if task.is_chief and session.global_step == 0:
            session.save()  # the tutorial's program saves at step 0 too
        while not session.should_stop():
            optimizer.zero_grad()
            try:
                loss = towers.backward(get_loss, batches, regularizer=regularizer)
            except StopIteration:  # ten epochs of the files have been read
                break
            optimizer.step(loss=loss)
        if task.is_chief:
            with session.averaged():
                found = accuracy(model)
            session.record(accuracy=found)
            print(f"test accuracy of the moving averages {found:.2%}")


if __name__ == "__main__":
    main()
