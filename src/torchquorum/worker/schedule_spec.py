"""`tq.schedule`, `tq.ExponentialDecay`, `tq.ExponentialMovingAverage`: what the ps tasks evaluate by themselves, named in the program.

Called by programs and by `tq.Optimizer`. What always holds: what they return travels, and names a class that the ps tasks know
(`torchquorum.update.schedules`, `torchquorum.update.averages`).
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchquorum.errors import ConfigError
from torchquorum.update import optimizers
from torchquorum.update.schedules import build, check_name, schedule_class
from torchquorum.wire.messages import AverageSpec, ScheduleSpec
from torchquorum.wire.settings import encode

Schedule = ScheduleSpec


def schedule(name: str | type[Any], **arguments: Any) -> Schedule:
    """Names a learning-rate schedule that the ps tasks evaluate by global step.

    Args:
        name: A class of torch.optim.lr_scheduler, or its name.
        **arguments: The class's arguments, without the optimizer.

    Returns:
        What `tq.Optimizer(..., schedule=)` takes.
    """
    called = name if isinstance(name, str) else name.__name__
    check_name(called)
    for key, value in arguments.items():
        if callable(value) and not isinstance(value, ScheduleSpec):
            raise ConfigError(f"{called}({key}=...): a function cannot travel to a ps; use a schedule without one")
    return ScheduleSpec(called, {k: _travels(v) for k, v in arguments.items()})


def ExponentialDecay(*, decay_steps: float, decay_rate: float, staircase: bool = False) -> Schedule:
    """As tf.train.exponential_decay: lr * decay_rate ** (global_step / decay_steps), the exponent floored if staircase."""
    if decay_steps <= 0:
        raise ConfigError(f"ExponentialDecay(decay_steps={decay_steps}): must be more than 0")
    return ScheduleSpec(
        "ExponentialDecay", {"decay_steps": decay_steps, "decay_rate": decay_rate, "staircase": staircase}
    )


def ExponentialMovingAverage(decay: float, *, num_updates: bool = True) -> AverageSpec:
    """Names moving averages of the variables, kept on the ps tasks, as tf.train.ExponentialMovingAverage.

    Args:
        decay: How much of the old average stays at each update, such as 0.99.
        num_updates: Decay less at the start: min(decay, (1 + step) / (10 + step)).
    """
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(f"ExponentialMovingAverage({decay}): must be between 0 and 1, such as 0.99")
    return AverageSpec(float(decay), num_updates)


def _travels(value: Any) -> Any:
    if isinstance(value, ScheduleSpec):
        return {"name": value.name, "arguments": value.arguments}
    return [_travels(v) for v in value] if isinstance(value, list | tuple) else encode(value)


def check_schedule(given: Schedule | None, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError unless a schedule can be made for an optimizer, as the ps tasks will: its class and arguments are looked at."""
    if given is None:
        return
    groups = [{**group, "params": [_like(group["params"])]} for group in optimizer.param_groups]
    try:
        build(given, optimizers.build(optimizers.name_of(type(optimizer)), groups))
    except ConfigError as error:
        known = inspect.signature(schedule_class(given.name)).parameters
        unknown = next((name for name in given.arguments if name not in known), "")
        near = difflib.get_close_matches(unknown, known, 1, 0.5) if unknown else []
        raise ConfigError(f"{error}" + (f"; did you mean {near[0]}?" if near else "")) from None


def _like(parameters: Sequence[torch.Tensor]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros((1,) * parameters[0].dim() if parameters else 1))


def read_schedule(given: Any) -> Schedule | None:
    """Returns what `tq.Optimizer(schedule=)` was given as it travels.

    Raises:
        ConfigError: It is no schedule, or one that belongs to one process.
    """
    if given is None or isinstance(given, ScheduleSpec):
        return given
    if isinstance(given, functools.partial) and not given.args:
        return schedule(given.func, **given.keywords)  # pyright: ignore[reportArgumentType]
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return schedule(given[0], **given[1])
    raise ConfigError(
        f"schedule={given!r}: give tq.schedule('StepLR', step_size=30), tq.ExponentialDecay(...), or "
        "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30); a scheduler object belongs to one process"
    )
