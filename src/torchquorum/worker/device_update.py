"""A worker's update on the board, made by the GPU that holds the parameters and the gradient.

Used by `torchquorum.worker.board_steps` in the worker's turn. The GPU takes the current version, if another worker has made it,
subtracts rate * gradient in place, and copies the result into the slot of the next version: what crosses the bus is one
version each way, and none where this worker made the last one itself. What always holds: if the update does not come to
be published, the parameters hold something that nobody has; the push by message that follows brings them a version again.
"""

from __future__ import annotations

import math

import torch

from torchquorum.placement.layout import CONSTANT
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.flat import FlatParameters


class DeviceUpdate:
    """The updates of one worker whose parameters are all on one GPU."""

    def __init__(self, flat: FlatParameters, exchange: Exchange) -> None:
        self._flat, self._exchange = flat, exchange
        trained = zip(flat.layout.variables, flat.parameters, strict=True)
        self._entries = [(p, v.group) for v, p in trained if v.group != CONSTANT]
        self._dtypes = [p for p, _ in self._entries if p.is_floating_point()]
        self._seen = self._counts()

    def gradients_there(self) -> bool:
        """Waits for the gradients to be computed, so that nobody waits for them in this worker's turn.

        Returns:
            Whether they are finite, as far as that is known already.
        """
        self._exchange.settle()
        gradients = self._flat.gradients
        return gradients is None or not gradients.in_use() or gradients.finite()

    def write(self, current: int, target: int, rates: list[float], *, held: bool) -> bool:
        """Makes the next version in the parameters and in slot `target`; False if it would not be finite.

        Args:
            current: The slot of the version to start from.
            target: Where the next version goes.
            rates: The learning rate of each parameter group.
            held: Whether the parameters hold the version to start from.
        """
        counts = self._counts()
        if not held or counts != self._seen:  # or somebody has changed the parameters by hand
            self._exchange.pull(0, current)
        self._seen = counts
        known = self._subtract(rates)
        self._exchange.put(0, target)
        total = None if known else sum(p.detach().sum(dtype=torch.float32) for p in self._dtypes)
        self._exchange.settle()
        return total is None or math.isfinite(float(total))

    def _subtract(self, rates: list[float]) -> bool:
        """Subtracts the gradients; True if it is known that they are finite."""
        gradients = self._flat.gradients
        if gradients is not None and gradients.in_use():
            for mine, gradient, group in self._flat.trained_runs():
                mine.add_(gradient, alpha=-rates[group])
            return gradients.totals is not None
        for parameter, group in self._entries:
            gradient = parameter.grad
            if gradient is not None:
                if gradient.layout != torch.strided:
                    gradient = gradient.to_dense()
                parameter.data.add_(gradient, alpha=-rates[group])
        return False

    def _counts(self) -> int:
        return sum(p._version for p, _ in self._entries)
