"""The worker's parameters as views of flat buffers, and the copies between those and the shards' memory.

Owned by the worker's thread. A module's parameters keep their identity; only their storage moves, once, into one buffer
per dtype and device. Those with a memory format of their own (channels_last) stay where they are. What always holds:
neighbours in a shard that are neighbours here are copied as one piece, so with one ps a pull is one copy per dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.placement.layout import CONSTANT, Layout, Region, Variable, padded


def describe(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Variable], list[nn.Parameter]]:
    """Returns the variables of a module in creation order, and the parameters that they stand for.

    A parameter that the optimizer does not know becomes a constant: the chief's value is every worker's. Shared (tied)
    parameters are one variable.
    """
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    variables, parameters = [], []
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {name} of a lazy module has no shape yet; run one batch through the model before"
            )
        group = group_of.pop(id(parameter), CONSTANT)
        dtype = str(parameter.dtype).removeprefix("torch.")
        variables.append(Variable(name=name, shape=tuple(parameter.shape), dtype=dtype, group=group))
        parameters.append(parameter)
    if group_of:
        raise ConfigError(
            f"the optimizer has {len(group_of)} parameters that the model does not: make the optimizer from "
            "model.parameters() of the model given to tq.Session"
        )
    if not any(v.group != CONSTANT for v in variables):
        raise ConfigError("the optimizer has none of the model's parameters, so there is nothing to train")
    return variables, parameters


class FlatParameters:
    """The parameters of one module, moved into flat buffers in the order of the shards' memory."""

    def __init__(self, layout: Layout, parameters: Sequence[nn.Parameter]) -> None:
        self.layout, self.parameters = layout, list(parameters)
        order = sorted(
            range(len(parameters)),
            key=lambda i: (layout.variables[i].group == CONSTANT, layout.variables[i].group, i),
        )
        self._place: dict[int, tuple[torch.Tensor, int]] = {}
        sliced = {v for parts in layout.parts for v, start, stop in parts if stop - start != layout.variables[v].numel}
        apart = {i for i, p in enumerate(parameters) if not p.is_contiguous() and i not in sliced}
        for dtype, device in {(p.dtype, p.device): None for p in parameters}:
            chosen = [
                i for i in order if (parameters[i].dtype, parameters[i].device) == (dtype, device) and i not in apart
            ]
            room = [padded(parameters[i].numel(), layout.variables[i].dtype) for i in chosen]
            buffer = torch.zeros(sum(room), dtype=dtype, device=device)
            offset = 0
            for i, taken in zip(chosen, room, strict=True):
                view = buffer[offset : offset + parameters[i].numel()]
                view.copy_(parameters[i].detach().reshape(-1))
                parameters[i].data = view.view(parameters[i].shape)
                self._place[i] = (buffer, offset)
                offset += taken

    def check(self) -> None:
        """Raises ConfigError if the module's parameters were moved or replaced since."""
        for i, (buffer, offset) in self._place.items():
            parameter = self.parameters[i]
            at = buffer.data_ptr()  # 0 on a backend whose tensors have no addresses, where this cannot be told
            if at and parameter.data_ptr() != at + offset * buffer.element_size() and parameter.numel():
                name = self.layout.variables[i].name
                raise ConfigError(
                    f"parameter {name} was moved after tq.Session began; move the model to its device and dtype before"
                )

    def load(self, region: Region, sections: Sequence[torch.Tensor]) -> None:
        """Copies a shard's memory into the parameters."""
        for ours, theirs in self._runs(region, sections):
            ours.copy_(theirs)

    def store(self, region: Region, sections: Sequence[torch.Tensor]) -> None:
        """Copies the parameters into a shard's memory."""
        for ours, theirs in self._runs(region, sections):
            theirs.copy_(ours)

    def _runs(self, region: Region, sections: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for section, theirs in zip(region.sections, sections, strict=True):
            merged: list[list[int]] = []
            buffers: list[torch.Tensor] = []
            for piece in section.pieces:
                if piece.variable not in self._place:
                    parameter = self.parameters[piece.variable]
                    there = theirs[piece.offset : piece.offset + piece.numel]
                    runs.append((parameter.data, there.view(parameter.shape)))
                    continue
                buffer, offset = self._place[piece.variable]
                here = offset + piece.start
                whole = piece.numel == self.parameters[piece.variable].numel()
                room = padded(piece.numel, section.dtype) if whole else piece.numel
                last = merged[-1] if merged and buffers[-1] is buffer else [-1, -1, 0]
                if (last[0] + last[2], last[1] + last[2]) == (here, piece.offset):
                    last[2] += room
                else:
                    merged.append([here, piece.offset, room])
                    buffers.append(buffer)
            for buffer, (here, there, count) in zip(buffers, merged, strict=True):
                runs.append((buffer[here : here + count], theirs[there : there + count]))
        return runs


class Puller:
    """Copies one slot of a shard into the parameters; the pairs of views are made once."""

    def __init__(self, flat: FlatParameters, region: Region, sections: Sequence[torch.Tensor]) -> None:
        self._runs = flat._runs(region, sections)

    def __call__(self) -> None:
        """Copies."""
        for ours, theirs in self._runs:
            ours.copy_(theirs)


class Pusher:
    """Copies the parameters' gradients into one gradient slot of a shard."""

    def __init__(self, flat: FlatParameters, region: Region, sections: Sequence[torch.Tensor]) -> None:
        self._entries: list[tuple[nn.Parameter, int, torch.Tensor, slice | None]] = []
        self._sections = [s for s in sections if s.dtype.is_floating_point]
        for section, theirs in zip(region.sections, sections, strict=True):
            for piece in section.pieces:
                parameter = flat.parameters[piece.variable]
                target = theirs[piece.offset : piece.offset + piece.numel]
                whole = piece.numel == parameter.numel()
                self._entries.append(
                    (
                        parameter,
                        piece.variable,
                        target.view(parameter.shape) if whole else target,
                        None if whole else slice(piece.start, piece.stop),
                    )
                )

    def finite(self) -> bool:
        """Whether what was copied last holds neither NaN nor infinity; reads it once, while it is still in the cache."""
        # A sum is not finite if a term is not; if it is only too large for its dtype, a second look says so.
        return all(math.isfinite(s.sum().item()) or bool(torch.isfinite(s).all()) for s in self._sections)

    def __call__(self) -> list[int]:
        """Copies, and returns the variables that have no gradient; their place is filled with zeros."""
        absent = []
        for parameter, variable, target, part in self._entries:
            gradient = parameter.grad
            if gradient is None:
                absent.append(variable)
                target.zero_()
                continue
            if gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            target.copy_(gradient if part is None else gradient.reshape(-1)[part])
        return absent
