"""The batches of the recommender's work: click prediction on made-up data. Imports nothing but numpy, so that TensorFlow's loop can.

26 features of one id each, of 200,000 ids by Zipf's law, so a few rows are hot and most are rare, and 13 numbers; batches of 2,048. The
label comes from hidden weights. The same seed gives the same batches everywhere.
"""

import numpy as np
import numpy.typing as npt

FEATURES, NUMBERS, IDS, DIM, BATCH = 26, 13, 200_000, 16, 2048
SKEW, BATCHES, WARM_UP = 1.1, 60, 10

Floats = npt.NDArray[np.float32]


def batches(seed: int, count: int = BATCHES) -> list[tuple[Floats, npt.NDArray[np.int64], Floats]]:
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
        found.append((numbers, ids.astype(np.int64), labels.astype(np.float32)))
    return found
