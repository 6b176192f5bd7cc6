"""Rows between this process and a GPU: through pinned memory, on a stream of their own, beside what the GPU computes.

Called by the modules of tables, and by the exchange of rows. What always holds: what is returned can be used at once, on the stream that is
current for its device, or on the CPU; a gradient that was changed after its copy had begun is copied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a CPU tensor's values on a device; to a GPU they are on their way, beside what it is doing."""
    if device.type != "cuda":
        return values.to(device)
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    side, current = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        found = pinned.to(device, non_blocking=True)  # the pinned memory is used again once this has been done
    current.wait_stream(side)
    found.record_stream(current)
    return found


@dataclass(eq=False, slots=True)
class HostCopy:
    """A tensor on its way to the CPU, which has come once `done`."""

    source: torch.Tensor
    version: int
    host: torch.Tensor
    done: torch.cuda.Event | None

    @classmethod
    def begin(cls, source: torch.Tensor) -> HostCopy:
        """Begins to copy a tensor; one that is on the CPU is taken as it is."""
        if source.device.type != "cuda":
            return cls(source, source._version, source.cpu(), None)
        side = _stream(source.device)
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            host.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(side)
        source.record_stream(side)
        return cls(source, source._version, host, done)

    def is_of(self, source: torch.Tensor) -> bool:
        """Whether it is a copy of a tensor as it is now."""
        return self.source is source and self.version == source._version

    def take(self) -> torch.Tensor:
        """Returns the copy, once it is whole."""
        if self.done is not None:
            self.done.synchronize()
        return self.host


def on_host(tensors: Sequence[torch.Tensor], begun: Sequence[HostCopy | None]) -> list[torch.Tensor]:
    """Returns tensors on the CPU; those whose copy was begun, and have not changed since, are there or nearly so."""
    copies = [
        early if early is not None and early.is_of(tensor) else HostCopy.begin(tensor)
        for tensor, early in zip(tensors, begun, strict=True)
    ]
    return [copy.take() for copy in copies]
