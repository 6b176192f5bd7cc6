"""A tower's copy of the model on another device than the model's own, kept equal to it.

Owned by `torchquorum.towers.towers`, on the worker's thread. What always holds: after `refresh` the copy's parameters,
buffers, modes and plain attributes are the model's; parameters that lie together in memory, as those of a session do, are
copied as one piece.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.worker.flat import as_part

PLAIN = (bool, int, float, str, type(None))
MOST_WASTE = 2  # memory that is copied along, in parameters' worth, before they are copied one by one


class Replica:
    """One device's copy of a model.

    Args:
        model: The model, on its own device.
        device: Where the copy lives. To torch, `torch.device("cpu", 1)` is the CPU; here it is a device with a copy of its own.

    Attributes:
        runs: What is copied as one piece each: memory of the model, and of the copy.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        try:
            self.module = copy.deepcopy(model).to(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"the model cannot be copied to {device} for a tower: {error}. Make tq.Towers before the first batch, and "
                "keep no results of a computation as attributes of the model."
            ) from error
        self.device = device
        self._modules = list(zip(model.modules(), self.module.modules(), strict=True))
        self._parameters = list(zip(model.parameters(), self.module.parameters(), strict=True))
        self.runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._mirrors: dict[tuple[object, ...], torch.Tensor] = {}
        self._where: tuple[int, ...] | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the copy equal to the model."""
        where = tuple(parameter.data_ptr() for parameter, _ in self._parameters)
        if where != self._where:  # a session has moved the parameters into memory of its own
            self._find_runs()
            self._where = where
        for theirs, ours in self.runs:
            ours.copy_(theirs, non_blocking=True)
        for theirs, ours in self._parameters:
            ours.requires_grad_(theirs.requires_grad)
        for original, mine in self._modules:
            copy_buffers(original, mine, self.device)
            for name, value in original.__dict__.items():
                if type(value) in PLAIN and mine.__dict__.get(name, self) is not value:
                    mine.__dict__[name] = value

    @torch.no_grad()
    def give_buffers(self, device: torch.device) -> None:
        """Makes the model's buffers equal to this copy's."""
        for original, mine in self._modules:
            copy_buffers(mine, original, device)

    def _find_runs(self) -> None:
        """Finds what can be copied as one piece: parameters of one storage that nearly fill the memory between them."""
        self.runs, before, self._mirrors = [], self._mirrors, {}
        together: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, nn.Parameter]]] = {}
        for parameter, ours in self._parameters:
            theirs = as_part(parameter)
            together.setdefault((theirs.untyped_storage().data_ptr(), theirs.dtype), []).append((theirs, ours))
        for (_, dtype), pairs in together.items():
            pairs = [(theirs, ours) for theirs, ours in pairs if theirs.numel()]
            if not pairs:
                continue
            first = min(theirs.storage_offset() for theirs, _ in pairs)
            count = max(theirs.storage_offset() + _extent(theirs) for theirs, _ in pairs) - first
            if count > (1 + MOST_WASTE) * sum(theirs.numel() for theirs, _ in pairs):
                self.runs += [(theirs, ours.detach()) for theirs, ours in pairs]
                continue
            shapes = tuple((p.storage_offset() - first, tuple(p.shape), p.stride()) for p, _ in pairs)
            key = (dtype, count, shapes, tuple(id(ours) for _, ours in pairs))
            mirror = before.get(key)
            if mirror is None:
                mirror = torch.empty(count, dtype=dtype, device=self.device)
                for (offset, shape, stride), (_, ours) in zip(shapes, pairs, strict=True):
                    ours.data = mirror.as_strided(shape, stride, offset)
            whole = pairs[0][0].as_strided((count,), (1,), first)
            self._mirrors[key] = mirror
            self.runs.append((whole, mirror))


def copy_buffers(source: nn.Module, target: nn.Module, device: torch.device) -> None:
    """Makes the buffers of one module, not of those inside it, equal to another's."""
    for name, buffer in source._buffers.items():
        mine = target._buffers.get(name)
        if buffer is None:
            target._buffers[name] = None
        elif mine is not None and (mine.shape, mine.dtype) == (buffer.shape, buffer.dtype):
            mine.copy_(buffer, non_blocking=device.type != "cpu")  # the CPU reads it at once
        else:
            target._buffers[name] = buffer.to(device, copy=True)


def _extent(tensor: torch.Tensor) -> int:
    """Returns how many elements of memory a tensor spans."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
