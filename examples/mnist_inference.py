"""The network that the tutorials share, 784-500-10: here a module, there `mnist_inference.inference(x, regularizer)`."""

import torch
from torch import nn
from torch.nn import functional

INPUT_NODE = 784
OUTPUT_NODE = 10
LAYER1_NODE = 500


class Inference(nn.Module):
    """One hidden layer with ReLU; weights from a truncated normal distribution, biases 0, as the book has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(INPUT_NODE, LAYER1_NODE)
        self.layer2 = nn.Linear(LAYER1_NODE, OUTPUT_NODE)
        for layer in (self.layer1, self.layer2):
            nn.init.trunc_normal_(layer.weight, std=0.1, a=-0.2, b=0.2)  # TensorFlow cuts at two deviations
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer2(functional.relu(self.layer1(x)))
