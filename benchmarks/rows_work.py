"""The recommender's work: click prediction by a small DLRM on made-up data, one thread a process.

26 features of one id each, of 200,000 ids by Zipf's law, so a few rows are hot and most are rare, and 13 numbers; batches of 2,048. The
label comes from hidden weights. The same seed gives the same batches everywhere.
"""

import itertools

import numpy as np
import torch
from torch import nn

FEATURES, NUMBERS, IDS, DIM, BATCH = 26, 13, 200_000, 16, 2048
SKEW, BATCHES, WARM_UP = 1.1, 60, 10

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batches(seed: int, count: int = BATCHES) -> list[Batch]:
    """Returns batches of numbers [B, 13], ids [B, 26] and labels [B]."""
    random, hidden = np.random.default_rng(seed), np.random.default_rng(7)
    weights = hidden.normal(0, 0.6, (FEATURES, 4096)).astype(np.float32)
    slope = hidden.normal(0, 0.3, NUMBERS).astype(np.float32)
    share = np.cumsum(1.0 / np.arange(1, IDS + 1) ** SKEW)
    found = []
    for _ in range(count):
        numbers = random.normal(size=(BATCH, NUMBERS)).astype(np.float32)
        ranks = np.searchsorted(share / share[-1], random.random((BATCH, FEATURES))).clip(max=IDS - 1)
        ids = (ranks * 7919 + np.arange(FEATURES) * 104_729) % IDS
        score = numbers @ slope + sum(weights[f, ranks[:, f] % 4096] for f in range(FEATURES)) / 2
        labels = random.random(BATCH) < 1 / (1 + np.exp(-score))
        found.append(tuple(map(torch.from_numpy, (numbers, ids.astype(np.int64), labels.astype(np.float32)))))
    return found


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
