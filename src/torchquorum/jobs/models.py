"""The MNIST models of the tutorials, and their evaluation.

Used by the built-in job, the examples and tests. Every model takes float32 images [n, 784] in 0..1 and returns logits [n, 10];
its weights come from torch's global generator, so `torch.manual_seed` before it is built determines them.
"""

import difflib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from torchquorum.data.mnist import Split
from torchquorum.errors import ConfigError


class Softmax(nn.Module):
    """Softmax regression, 784-10: 7,850 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(784, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, 10] of images [n, 784]."""
        return self.fc(images)


class MLP(nn.Module):
    """One hidden layer with ReLU, 784-500-10: 397,510 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, 10] of images [n, 784]."""
        return self.fc2(functional.relu(self.fc1(images)))


class CNN(nn.Module):
    """The convolutional network of TensorFlow's MNIST tutorial: 1,663,370 parameters.

    Two 5 x 5 convolutions with 32 and 64 channels, each with ReLU and 2 x 2 max pooling, then 512 hidden units.

    Args:
        dropout: The dropout rate in training, 0.5 as in the tutorial; 0 makes it deterministic.
    """

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        self.fc1 = nn.Linear(7 * 7 * 64, 512)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, 10] of images [n, 784]."""
        x = images.view(-1, 1, 28, 28)
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return self.fc2(self.dropout(x))


MODELS: dict[str, Callable[[], nn.Module]] = {"softmax": Softmax, "mlp": MLP, "cnn": CNN}


def make_model(name: str) -> nn.Module:
    """Builds the model called `name`: "softmax", "mlp" or "cnn".

    Raises:
        ConfigError: There is no such model; the message suggests the nearest name.
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, n=1)
        suggestion = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"model={name!r}: must be one of {', '.join(MODELS)}{suggestion}")
    return MODELS[name]()


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, batch_size: int = 1000) -> tuple[float, float]:
    """Evaluates a model on a split in eval mode, and restores the mode of every module.

    Args:
        model: Takes images [n, 784], returns logits [n, 10]; on any device.
        split: The images and labels.
        batch_size: Images per forward pass; the result does not depend on it.

    Returns:
        The mean cross entropy and the share of correctly classified images, 0..1.

    Raises:
        ConfigError: The batch size is below 1 or the split is empty.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: must be 1 or more")
    if len(split) == 0:
        raise ConfigError("split: has no images; must have 1 or more")
    device = next((parameter.device for parameter in model.parameters()), split.labels.device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    loss_sum, right = 0.0, 0
    try:
        for rows in torch.arange(len(split), device=split.labels.device).split(batch_size):
            labels = split.labels.index_select(0, rows).to(device)
            logits = model(split.inputs(rows).to(device))
            loss_sum += functional.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(dim=1) == labels).sum())
    finally:
        for module, training in modes:
            module.training = training
    return loss_sum / len(split), right / len(split)
