"""Exponential moving averages of a shard's variables, as tf.train.ExponentialMovingAverage computes them.

Owned by the ps thread, called after every update. With d = min(decay, (1 + n) / (10 + n)), n the global step after the
update, or d = decay without `num_updates`: shadow -= (1 - d) * (shadow - variable), in the variable's own precision. A
shadow starts as its variable's first value; there is no bias correction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchquorum.errors import ConfigError
from torchquorum.wire.messages import AverageSpec


class Averages:
    """The shadows of one shard, section by section."""

    def __init__(self, spec: AverageSpec, values: Sequence[torch.Tensor]) -> None:
        if not 0.0 <= spec.decay <= 1.0:
            raise ConfigError(f"moving averages with decay {spec.decay}: must be between 0 and 1, such as 0.99")
        self._spec = spec
        self.shadows = [value.clone() for value in values]

    def rate(self, version: int) -> float:
        """Returns 1 - d for the update that made `version`, in float32 as TensorFlow has it."""
        decay = np.float32(self._spec.decay)
        if self._spec.num_updates:
            decay = min(decay, np.float32(1 + version) / np.float32(10 + version))
        return float(np.float32(1) - decay)

    def follow(self, values: Sequence[torch.Tensor], version: int) -> None:
        """Takes the values of a new version into the averages."""
        rate = self.rate(version)
        for shadow, value in zip(self.shadows, values, strict=True):
            shadow.sub_(shadow - value, alpha=rate)
