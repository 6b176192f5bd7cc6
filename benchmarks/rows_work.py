"""The recommender's work: click prediction by a small DLRM on made-up data (`rows_data`), one thread a process."""

import itertools

import rows_data
import torch
from rows_data import BATCH as BATCH
from rows_data import BATCHES, DIM, FEATURES, NUMBERS
from rows_data import IDS as IDS
from rows_data import WARM_UP as WARM_UP
from torch import nn

Batch = tuple[torch.Tensor, ...]


def batches(seed: int, count: int = BATCHES) -> list[Batch]:
    """Returns batches of numbers [B, 13], ids [B, 26] and labels [B]."""
    return [tuple(map(torch.from_numpy, batch)) for batch in rows_data.batches(seed, count)]


def layers(*sizes: int) -> nn.Sequential:
    """Returns linear layers with ReLU between them."""
    made: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        made += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*made[:-1])


class Interaction(nn.Module):
    """What of a DLRM is dense: it takes the numbers and a row of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = layers(NUMBERS, 64, DIM)
        self.top = layers(DIM + (FEATURES + 1) * FEATURES // 2, 128, 1)
        self.register_buffer("pairs", torch.tril_indices(FEATURES + 1, FEATURES + 1, -1), persistent=False)

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns a logit for each example."""
        dense = torch.relu(self.bottom(numbers))
        every = torch.cat([dense.unsqueeze(1), rows], 1)
        dots = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, dots], 1)).squeeze(1)
