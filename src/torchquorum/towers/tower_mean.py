"""The mean of the towers' gradients, per variable: brought to one device, added in order, divided once.

Called by `torchquorum.towers.towers`. What always holds: the sum has the order of the towers and the gradients' own precision,
as a round on the ps has (docs/adr/0008), so two towers give the bits that two workers would; a gradient that one tower lacks
counts as zero, and one that all lack stays None.
"""

from __future__ import annotations

import torch

Gradients = list[torch.Tensor | None]


def bring(gradients: Gradients, device: torch.device) -> Gradients:
    """Returns the gradients on a device, moved in one piece per dtype."""
    found = list(gradients)
    away: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
    for i, gradient in enumerate(gradients):
        if gradient is None or gradient.device == device:
            continue
        if gradient.layout is torch.strided:
            away.setdefault(gradient.dtype, []).append((i, gradient))
        else:
            found[i] = gradient.to(device)
    for pairs in away.values():
        flat = torch.cat([gradient.reshape(-1) for _, gradient in pairs]).to(device)
        for (i, gradient), part in zip(pairs, flat.split([g.numel() for _, g in pairs]), strict=True):
            found[i] = part.view(gradient.shape)
    return found


class TowerSum:
    """Adds the gradients of one tower after another; `weights` are theirs in that order, None if all count the same."""

    def __init__(self, weights: list[float] | None = None) -> None:
        self._weights, self._count = weights, 0
        self._sum: Gradients = []

    @torch.no_grad()
    def add(self, gradients: Gradients) -> None:
        """Adds the next tower's gradients, which become this sum's own."""
        if self._weights is not None:
            _scale(gradients, self._weights[self._count])
        self._count += 1
        if self._count == 1:
            self._sum = list(gradients)
            return
        into, new = [], []
        for i, gradient in enumerate(gradients):
            before = self._sum[i]
            if gradient is None or before is None:
                self._sum[i] = gradient if before is None else before
            elif gradient.layout is before.layout is torch.strided:
                into.append(before)
                new.append(gradient)
            else:  # sparse ones stay so only among themselves
                alike = gradient.layout is before.layout
                self._sum[i] = before + gradient if alike else before.to_dense() + gradient.to_dense()
        if into:
            torch._foreach_add_(into, new)

    @torch.no_grad()
    def mean(self) -> Gradients:
        """Returns the mean gradient of every variable."""
        if self._weights is None and self._count > 1:
            for gradient in self._sum:
                if gradient is not None:
                    gradient.div_(self._count)
        return self._sum


def _scale(gradients: Gradients, weight: float) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(weight)
