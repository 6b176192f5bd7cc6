"""The optimizer's state as the ps tasks sent it, and as torch.optim has it.

Made by a worker that asked for it. What always holds: the state of every variable is whole, whichever ps tasks hold parts of it; a plain
optimizer of the same class that loads it goes on as the ps tasks would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchquorum.placement.layout import Variable
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import StateRef
from torchquorum.wire.settings import RATE, Settings, decode


class OptimizerState:
    """The state of all variables, gathered from the ps tasks.

    Args:
        variables: The run's variables.
        parts: What each ps task sent: what there is, and its bytes.
    """

    def __init__(self, variables: Sequence[Variable], parts: Sequence[tuple[StateRef, Frame]]) -> None:
        self._of: list[dict[str, Any]] = [{} for _ in variables]
        index = {variable.name: i for i, variable in enumerate(variables)}
        for ref, frame in parts:
            for name, numbers in ref.scalars.items():
                self._of[index[name]] |= {key: decode(value) for key, value in numbers.items()}
            at, memory = 0, torch.frombuffer(bytearray(frame), dtype=torch.uint8) if len(frame) else torch.empty(0)
            for piece in ref.pieces:
                dtype, variable = getattr(torch, piece.dtype), variables[piece.variable]
                size = piece.count * dtype.itemsize
                values = memory[at : at + size].clone().view(dtype)
                at += size
                if piece.shape:
                    self._of[piece.variable][piece.state] = values.view(piece.shape)
                    continue
                state = self._of[piece.variable]
                if piece.state not in state:
                    state[piece.state] = torch.zeros(tuple(variable.shape), dtype=dtype)
                state[piece.state].view(-1)[piece.start : piece.start + piece.count] = values

    def in_torchs_layout(
        self,
        groups: Sequence[dict[str, Any]],
        parameters: Sequence[nn.Parameter],
        settings: Settings,
        rates: Sequence[float],
    ) -> dict[str, Any]:
        """Returns what `state_dict()` of a plain optimizer would be.

        Args:
            groups: The program's parameter groups, for their parameters and for what is in them besides the run's settings.
            parameters: The parameters of the variables, in their order.
            settings: The run's settings.
            rates: The learning rate of each group for the next update.
        """
        numbers: dict[int, int] = {}
        packed = []
        for group, options, rate in zip(groups, settings, rates, strict=True):
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
            kept = {name: value for name, value in group.items() if name != "params"}
            now = {name: decode(value) for name, value in options.items()}
            if RATE not in now and RATE in kept:
                now[RATE] = rate
            packed.append({**kept, **now, "params": [numbers[id(p)] for p in group["params"]]})
        state = {
            numbers[id(parameter)]: {name: _beside(value, parameter) for name, value in found.items()}
            for parameter, found in zip(parameters, self._of, strict=True)
            if found and id(parameter) in numbers
        }
        return {"state": dict(sorted(state.items())), "param_groups": packed}


def _beside(value: Any, parameter: nn.Parameter) -> Any:
    """Returns a state where torch.optim keeps it: with the parameter, but for the count of steps."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
