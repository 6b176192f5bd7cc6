"""Writes what was read into a model, in place: its parameters keep their identity, their device and their dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.worker.table_module import Anchor
from torchquorum.worker.variable_names import plain_names


def write_model(
    model: nn.Module, values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], *, partly: bool = False
) -> None:
    """Writes variables and buffers.

    Args:
        model: The model, of the run's program.
        values: Variables by name.
        buffers: Buffers by name; the model's others stay as they are.
        partly: Whether the model has parameters that are not among these; otherwise that is an error, and nothing is written.

    Raises:
        ConfigError: The model is not that of the run.
    """
    plain = plain_names(model)
    parameters = {plain(name): p for name, p in model.named_parameters() if not isinstance(p, Anchor)}
    own_buffers = {plain(name): b for name, b in model.named_buffers()}
    wrong = [
        f"{name} is {list(values[name].shape)} there and {list(p.shape)} here"
        for name, p in parameters.items()
        if name in values and p.shape != values[name].shape
    ]
    if not partly:
        wrong += [f"no {name}" for name in parameters if name not in values]
        wrong += [f"{name}, which the model has not" for name in values if name not in parameters]
    wrong += [
        f"buffer {name} is {list(value.shape)} there and {list(own_buffers[name].shape)} here"
        for name, value in buffers.items()
        if name in own_buffers and own_buffers[name].shape != value.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(
            f"the run has another model than this one: {', '.join(wrong[:3])}{more}; build it as the program does"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in values:
                parameter.data.copy_(values[name])
        for name, value in buffers.items():
            if name in own_buffers:
                own_buffers[name].copy_(value)
