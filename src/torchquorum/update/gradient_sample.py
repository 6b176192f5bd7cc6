"""A checksum of some elements of a gradient: workers that give equal gradients round after round read the same batches.

Computed by a worker where it looks at a gradient's norm, compared by ps task 0 (`torchquorum.rules.equal_gradients`). What always holds:
gradients with the same bits have the same checksum; it is never 0, which stands for no look.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

ELEMENTS, TENSORS = 64, 4
OF, LOOKS = 128, 8  # the first 8 of 128 rounds are looked at


def is_sampled(version: int) -> bool:
    """Whether the gradients of the round that is open at a version are looked at."""
    return version % OF < LOOKS


def sample_of(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the checksum of an even sample of these tensors' elements; they lie in the host's memory, in one piece each."""
    found = 1
    for tensor in tensors[:: max(1, len(tensors) // TENSORS)]:
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            some = flat[:: max(1, flat.numel() // ELEMENTS)].contiguous()
            found = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), found)
    return found or 1
