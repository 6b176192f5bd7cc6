"""The one piece of work that all are measured on: MNIST, mlp 784-500-10, batch 100, SGD 0.01 or another, L2 1e-4, a thread a process."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from torchquorum.data import load_mnist

BATCH = 100
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
}
WARM_UP = 200


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the 55,000 training images as float32 in 0..1, and their labels."""
    return load_mnist().train.tensors()


def make_model() -> nn.Module:
    """Returns the mlp 784-500-10."""
    return nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10))


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the loss of one random batch."""
    rows = torch.randint(0, len(images), (BATCH,))
    weights = [p for p in model.parameters() if p.dim() == 2]
    return cross_entropy(model(images[rows]), labels[rows]) + 5e-5 * sum(w.square().sum() for w in weights)
