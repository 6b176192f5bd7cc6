"""The norm of a gradient, which also tells whether it is finite: one look at the gradient gives both.

Called where a worker looks at a gradient before it is pushed. What always holds: the norm is infinite or NaN if, and only if, an
element is; one that is only too large for its dtype is computed again in a way that cannot overflow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch

_DOT = frozenset([torch.float32, torch.float64])


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """Returns the square root of the sum of the squares of all elements; of tensors that hold whole numbers nothing."""
    values = [_values(t) for t in tensors if t.is_floating_point()]
    if len(values) == 1 and values[0].dim() == 1 and values[0].dtype in _DOT and values[0].is_cpu:
        total = math.sqrt(torch.dot(values[0], values[0]).item())  # the fastest way where there is one
    elif len({v.device for v in values}) == 1 and not values[0].is_cpu:
        total = torch.stack(norms_of(values)).norm().item()  # one wait for the GPU
    else:
        total = math.hypot(*(norm.item() for norm in norms_of(values))) if values else 0.0
    return total if math.isfinite(total) else _careful(values)


def norms_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the norm of each tensor, where it lies; infinite also if the sum of the squares is too large."""
    wide = any(t.dtype == torch.float64 for t in tensors)
    with torch.no_grad():
        return list(torch._foreach_norm(list(tensors), 2, torch.float64 if wide else torch.float32))


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what a gradient holds; of a sparse one the values, each place once."""
    tensor = tensor.detach()
    return tensor if tensor.layout == torch.strided else tensor.coalesce().values()


def _careful(tensors: Sequence[torch.Tensor]) -> float:
    """Returns the norm of tensors whose squares may be too large: in units of the largest element."""
    sizes = [float(t.abs().max()) for t in tensors if t.numel()]
    if not all(map(math.isfinite, sizes)):
        return math.inf if math.inf in sizes else math.nan
    largest = max(sizes)
    parts = [float((t.double() / largest).norm()) for t in tensors]
    return min(largest * math.hypot(*parts), sys.float_info.max)
