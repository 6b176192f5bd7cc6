"""The scene in which the documents' Python blocks play: the names that a reader has in mind when a page shows part of a
program, such as `model`, `task` and `batches`.

A document's blocks share one set of names, so that a later block may build on an earlier one; but every block finds a fresh
task, model and optimizer. Sessions end after a few steps. The CPU stands in for devices that this machine lacks.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchquorum as tq
from torchquorum.jobs.models import MLP
from torchquorum.session.session import Session

STEPS = 3
TEST_IMAGES = 1000


class ShortSession(Session):
    """A session that ends after a few steps, whatever the page says."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if options.get("num_steps") is not None:
            options["num_steps"] = min(options["num_steps"], STEPS)
        else:
            options["last_step"] = min(options.get("last_step") or STEPS, STEPS)
        super().__init__(*arguments, **options)


class Model(MLP):
    """The model of the scene, with the parts that some pages speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


def shorten_sessions() -> None:
    """Makes `tq.Session` a short one, in this process."""
    tq.Session = ShortSession  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


def lengthen_sessions() -> None:
    """Makes `tq.Session` the real one again, in this process."""
    tq.Session = Session  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


def evaluate_less() -> None:
    """Leaves a few of the test images, in this process: a command here evaluates for longer than it trains."""
    load = tq.data.load_mnist

    def load_less(*arguments: Any) -> tq.data.Mnist:
        data = load(*arguments)
        test = replace(data.test, images=data.test.images[:TEST_IMAGES], labels=data.test.labels[:TEST_IMAGES])
        return replace(data, test=test)

    tq.data.load_mnist = load_less  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


def fresh_names(mnist: Any) -> dict[str, Any]:
    """Returns what every block finds anew."""
    model = Model()
    return {
        "task": tq.join([], allow_soft_placement=True),
        "model": model,
        "inner": torch.optim.SGD(model.parameters(), lr=0.01),
        "optimizer": tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01)),
        "batches": tq.Batches(mnist.train, 10),
        "x": torch.rand(10, 784),
        "y": torch.zeros(10, dtype=torch.int64),
    }


def names() -> dict[str, Any]:
    """Returns the scene at a document's beginning."""
    mnist = tq.data.load_mnist()
    validation = [(torch.rand(10, 784), torch.zeros(10, dtype=torch.int64))]
    return {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "np": np,
        "tq": tq,
        "functools": functools,
        "argparse": argparse,
        "itertools": itertools,
        "safetensors": safetensors,
        "MLP": MLP,
        "Inference": MLP,
        "cross_entropy": cross_entropy,
        "loss_fn": nn.CrossEntropyLoss(),
        "mnist": mnist,
        "data": mnist.train,
        "a": torch.ones(3),
        "b": torch.ones(3),
        "validation": validation,
        "size": 10,
        "accuracy": lambda model, data: 0.5,
        "evaluate": lambda model: 0.5,
        "image": np.zeros(784, np.uint8),
        "read_images": lambda: iter([torch.zeros(3)] * 4),
        "read_texts": lambda: iter(["a text"] * 4),
        "refresh": lambda: None,
        "letters": lambda text: torch.tensor(list(text.encode()), dtype=torch.uint8),
        "join": lambda first, second: torch.cat([first, second]),
    }
