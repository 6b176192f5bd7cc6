"""The optimizer's state that a program has loaded, as it goes to the ps tasks: what `torchquorum.worker.optimizer_state` brings back.

Made by `tq.Optimizer` after torch.optim has loaded a state dict into the optimizer that it wraps. What always holds: a state that the
ps tasks' optimizer could not go on from is an error before anything is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.placement.layout import CONSTANT, Layout
from torchquorum.update import optimizers
from torchquorum.update.spans import ELEMENTWISE
from torchquorum.wire.messages import StatePiece, StateRef
from torchquorum.wire.settings import Settings, encode

# Which implementation of an optimizer runs, which does not change what it keeps.
_WAYS = ("fused", "foreach", "capturable", "differentiable")
States = Mapping[Any, dict[str, Any]]  # by parameter, as torch.optim has them


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state for all variables.

    Attributes:
        name: The class of the optimizer.
        states: By parameter.
        settings: The options of each parameter group that came with it.
    """

    name: str
    states: States
    settings: Settings

    def part(
        self, shard: int, layout: Layout, parameters: Sequence[nn.Parameter]
    ) -> tuple[StateRef, memoryview | bytes]:
        """Returns what one ps task gets: what there is, and its bytes."""
        ref, parts = StateRef([], {}), list[bytes]()
        for section in layout.trained[shard].sections:
            for piece in section.pieces:
                variable, found = layout.variables[piece.variable], self.states.get(parameters[piece.variable])
                for name, value in (found or {}).items():
                    if not isinstance(value, torch.Tensor) or value.dim() == 0:
                        ref.scalars.setdefault(variable.name, {})[name] = encode(value)
                        continue
                    whole = tuple(value.shape) != variable.shape
                    flat = value.detach().reshape(-1).cpu()
                    flat = flat if whole else flat[piece.start : piece.stop]
                    start, shape = (0, tuple(value.shape)) if whole else (piece.start, ())
                    dtype = str(flat.dtype).removeprefix("torch.")
                    ref.pieces.append(StatePiece(piece.variable, name, start, flat.numel(), shape, dtype))
                    parts.append(flat.contiguous().view(torch.uint8).numpy().tobytes())
        return ref, b"".join(parts)

    def check(self, layout: Layout, parameters: Sequence[nn.Parameter], planned: Settings) -> None:
        """Raises ConfigError if the ps tasks' optimizer could not go on from this state.

        Args:
            layout: Where the variables are.
            parameters: The parameters of the variables.
            planned: The run's settings.
        """
        for number, (group, wanted) in enumerate(zip(self.settings, planned, strict=True)):
            if missing := sorted(set(wanted) - set(group)):
                raise _not_of_this(self.name, f"param_groups[{number}] has no {', '.join(missing)}")
        expected: dict[tuple[int, int], tuple[set[str], bool]] = {}
        for variable, parameter in zip(layout.variables, parameters, strict=True):
            if variable.group == CONSTANT:
                continue
            found = self.states.get(parameter, {})
            kind = variable.group, len(variable.shape)
            if kind not in expected:
                expected[kind] = _expected(self.name, self.settings[variable.group], len(variable.shape))
            names, eager = expected[kind]
            if (found or eager) and (missing := sorted(names - set(found))):
                raise _not_of_this(self.name, f"the state of {variable.name} has no {', '.join(missing)}")
            for name, value in found.items():
                self._check_value(variable.name, variable.shape, name, value)

    def _check_value(self, variable: str, shape: Sequence[int], name: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            encode(value)
        elif self.name in ELEMENTWISE and value.dim() > 0 and tuple(value.shape) != tuple(shape):
            raise ConfigError(
                f"optimizer.load_state_dict(): {name} of {variable} has the shape {list(value.shape)}, and the parameter {list(shape)}: "
                "it is the state of another model"
            )


def begun_state(name: str, states: States, settings: Settings) -> LoadedState | None:
    """Returns the state of an optimizer that has made steps before the run, or was given a state; None for a new one."""
    if not any(_has_begun(state) for state in states.values()):
        return None
    return LoadedState(name, dict(states), settings)


def _has_begun(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state is of a step that was made; some optimizers keep one from the beginning."""
    return bool(state) and ("step" not in state or float(state["step"]) != 0)


def _expected(name: str, options: Mapping[str, Any], dim: int) -> tuple[set[str], bool]:
    """Returns what an optimizer with these options keeps of a parameter, and whether it needs that before its first step."""
    parameter = nn.Parameter(torch.zeros((2,) * dim))
    parameter.grad = torch.ones_like(parameter)
    group = {"params": [parameter], **{k: v for k, v in options.items() if k not in _WAYS}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = optimizers.build(name, [group])
            eager = bool(optimizer.state[parameter])
            optimizers.step_without_hooks(optimizer)
    except Exception:  # one that wants other shapes, or a closure: nothing is known of it
        return set(), False
    return {key for key, value in optimizer.state[parameter].items() if value is not None}, eager


def _not_of_this(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"optimizer.load_state_dict(): {what}, which {name} needs to go on: it is the state of another optimizer, or of other options. "
        "Nothing was loaded"
    )
