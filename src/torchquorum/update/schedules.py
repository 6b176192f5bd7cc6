"""Learning-rate schedules, evaluated on the ps by global step.

A schedule travels as a class name in torch.optim.lr_scheduler, or `ExponentialDecay` from here, with its arguments; those
that take other schedules (SequentialLR, ChainedScheduler) nest. Update k, counted from 0, uses the rate of step k.
"""

from __future__ import annotations

import difflib
import warnings
from math import floor
from typing import Any

import torch
from torch.optim import lr_scheduler

from torchquorum.errors import ConfigError
from torchquorum.wire.messages import ScheduleSpec

IMPOSSIBLE = {
    "LambdaLR": "a function cannot travel to a ps",
    "MultiplicativeLR": "a function cannot travel to a ps",
    "ReduceLROnPlateau": "it follows a metric, not the global step",
}
OBJECT = "make a scheduler object of the tq.Optimizer instead and call its step(), or use another class of torch.optim.lr_scheduler"


class ExponentialDecay(lr_scheduler.LRScheduler):
    """As tf.train.exponential_decay: lr * decay_rate ** (global_step / decay_steps), the exponent floored if staircase."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        if decay_steps <= 0:
            raise ConfigError(f"ExponentialDecay(decay_steps={decay_steps}): must be more than 0")
        self.decay_steps, self.decay_rate, self.staircase = decay_steps, decay_rate, staircase
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the rate of every parameter group at this step."""
        exponent = self.last_epoch / self.decay_steps
        factor = self.decay_rate ** (floor(exponent) if self.staircase else exponent)
        return [base * factor for base in self.base_lrs]


def schedule_class(name: str) -> type[Any]:
    """Returns a schedule class by name, and nothing else."""
    if name == "ExponentialDecay":
        return ExponentialDecay
    if name in IMPOSSIBLE:
        raise ConfigError(f"{name} cannot run on a ps: {IMPOSSIBLE[name]}; {OBJECT}")
    found = getattr(lr_scheduler, name, None)
    if not (isinstance(found, type) and issubclass(found, lr_scheduler.LRScheduler)) or name == "LRScheduler":
        classes = [
            n
            for n, k in vars(lr_scheduler).items()
            if isinstance(k, type) and n.endswith(("LR", "Scheduler", "Restarts"))
        ]
        near = difflib.get_close_matches(name, [*classes, "ExponentialDecay"], 1, 0.5)
        raise ConfigError(
            f"schedule {name!r}: allowed are ExponentialDecay and the classes of torch.optim.lr_scheduler"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return found


def check_name(name: str) -> None:
    """Raises ConfigError if no schedule has this name."""
    if name not in IMPOSSIBLE:  # of those it is said, first, that their functions cannot travel
        schedule_class(name)


def build(spec: ScheduleSpec, optimizer: torch.optim.Optimizer) -> Any:
    """Makes the schedule, at step 0 of the optimizer."""
    arguments = {k: _resolve(v, optimizer) for k, v in spec.arguments.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if spec.name == "ChainedScheduler":
                return lr_scheduler.ChainedScheduler(arguments["schedulers"], optimizer)
            return schedule_class(spec.name)(optimizer, **arguments)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"schedule {spec.name}({spec.arguments}): {error}") from None


def _resolve(value: Any, optimizer: torch.optim.Optimizer) -> Any:
    if isinstance(value, list):
        return [_resolve(v, optimizer) for v in value]
    if isinstance(value, dict) and set(value) == {"name", "arguments"}:
        return build(ScheduleSpec(value["name"], value["arguments"]), optimizer)
    return value
