"""The settings of a run: the options of each parameter group (lr, weight_decay, betas ...) as they travel, and what changes in them.

Shared by the worker, which reads them from its optimizer, and the ps tasks, which use them. Pure. What always holds: a value that
travels is a number, a word, nothing, a list of such, or a tensor of one number as a mapping; `decode` gives back what `encode` took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchquorum.errors import ConfigError

Settings = list[dict[str, Any]]  # of each parameter group, its options by name
RATE = "lr"


def encode(value: Any) -> Any:
    """Returns an option as it travels.

    Raises:
        ConfigError: It cannot travel.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value  # np.float64 is a float
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    raise ConfigError(f"{value!r} cannot travel to a ps: only numbers, words and lists of them can")


def decode(value: Any) -> Any:
    """Returns an option as it was before it travelled: a tuple, a tensor, or itself."""
    if isinstance(value, dict):
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return tuple(decode(v) for v in value) if isinstance(value, list) else value


def changes(before: Settings, after: Settings) -> Settings:
    """Returns, of each group, the options that `after` has and `before` has not, or has otherwise; empty if there are none."""
    found = [
        {name: value for name, value in now.items() if name not in was or was[name] != value}
        for was, now in zip(before, after, strict=True)
    ]
    return found if any(found) else []


def changed(before: Settings, change: Settings) -> Settings:
    """Returns settings after a change, of which nothing means none."""
    return [{**was, **now} for was, now in zip(before, change, strict=True)] if change else before


def only_rates(change: Settings) -> bool:
    """Whether a change is one of learning rates that are plain numbers, and of nothing else."""
    return all(name == RATE and isinstance(value, float | int) for group in change for name, value in group.items())


def with_rates(settings: Settings, rates: Sequence[float]) -> Settings:
    """Returns settings with other learning rates, one per group; the same object if they have these."""
    if all(group.get(RATE) == rate for group, rate in zip(settings, rates, strict=True)):
        return settings
    return [{**group, RATE: rate} for group, rate in zip(settings, rates, strict=True)]


def is_like(value: Any, before: Any) -> bool:
    """Whether an option may have this value, given the one it had; both as they travel."""
    if isinstance(before, list):
        return isinstance(value, list) and len(value) == len(before) and all(map(is_like, value, before))
    if isinstance(value, dict):
        return _is_number(value.get("tensor")) and isinstance(
            getattr(torch, str(value.get("dtype")), None), torch.dtype
        )
    if _is_number(before) or isinstance(before, dict):
        return _is_number(value)
    return value is None or isinstance(value, bool | int | float | str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def describe(change: Settings) -> str:
    """Returns a change in words, such as `lr=0.05` or, with several groups, `group 1: lr=0.05`."""
    shown = [
        (f"group {k}: " if len(change) > 1 else "") + ", ".join(f"{name}={_short(v)}" for name, v in group.items())
        for k, group in enumerate(change)
        if group
    ]
    return "; ".join(shown[:4]) + (f"; and {len(shown) - 4} groups more" if len(shown) > 4 else "")


def _short(value: Any) -> str:
    value = decode(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
