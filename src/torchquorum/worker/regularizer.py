"""The seeds' weight decay: tf.contrib.layers.l2_regularizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from torchquorum.errors import ConfigError


def l2_regularizer(scale: float) -> Callable[[nn.Module | Iterable[torch.Tensor]], torch.Tensor]:
    """Returns a function that gives scale * sum(w^2) / 2 over the weights of a module, to be added to the loss.

    Weights are parameters of two or more dimensions, so biases and normalisation do not count; its gradient is scale * w.

    Args:
        scale: 0.0 or more, a float.
    """
    if isinstance(scale, bool) or not isinstance(scale, float) or scale < 0:
        raise ConfigError(f"l2_regularizer({scale!r}): must be a float, 0.0 or more, such as 1e-4")

    def regularize(weights: nn.Module | Iterable[torch.Tensor]) -> torch.Tensor:
        given = weights.parameters() if isinstance(weights, nn.Module) else weights
        chosen = [w for w in given if w.dim() >= 2 and w.requires_grad]
        if not chosen:
            return torch.zeros(())
        home = chosen[0].device  # the model may be spread over devices
        return torch.stack([_sum_of_squares(w).to(home) for w in chosen]).sum() * (scale / 2)

    return regularize


def _sum_of_squares(weights: torch.Tensor) -> torch.Tensor:
    """Sums in pairs, as torch's sum does; torch.dot adds one by one and loses a percent over millions of weights."""
    wide = weights if weights.dtype in (torch.float32, torch.float64) else weights.float()
    return wide.square().sum()
