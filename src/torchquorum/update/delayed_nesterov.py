"""SGD whose momentum is applied once in every N updates: for asynchronous local steps.

Used by the ps as the outer optimizer of `tq.Local(h, rule=tq.Async())` and other rules under which one worker's change is an update.
There momentum would repeat a stale change many times over; N is how many such updates a round of all workers would have been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class DelayedNesterov(torch.optim.Optimizer):
    """Liu et al. 2024, Asynchronous Local-SGD Training for Language Modeling, algorithm 3, with c = 0.

    D += g; at every N-th update m = momentum * m + D / N, x -= lr * (momentum * m + g / N), D = 0; at the others x -= lr * g / N. With
    `nesterov` false the m on the right is the one of before. With N = 1 it is SGD with momentum, as torch.optim has it.

    Args:
        params: What is optimized.
        lr: The learning rate.
        momentum: The momentum.
        nesterov: Whether the momentum looks ahead.
        every: N.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True, every: int = 1
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: must be 1 or more")
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Makes an update."""
        found = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return found

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, every, rate = self.state[parameter], group["every"], group["lr"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["momentum_buffer"], state["delta"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        momentum, delta = state["momentum_buffer"], state["delta"]
        delta.add_(gradient)
        if int(state["step"]) % every:
            parameter.add_(gradient, alpha=-rate / every)
            return
        before = momentum if group["nesterov"] else momentum.clone()
        momentum.mul_(group["momentum"]).add_(delta, alpha=1 / every)
        parameter.add_(gradient, alpha=-rate / every).add_(before, alpha=-rate * group["momentum"])
        delta.zero_()
