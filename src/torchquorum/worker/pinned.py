"""Shared memory that a GPU reads and writes by itself: registered with CUDA once, as long as the worker uses it.

Owned by the worker's exchange. What always holds: memory that cannot be registered is used as it is, with copies that
wait; what was registered is given back before its memory goes away.
"""

from __future__ import annotations

from typing import Any

import torch


class Pinned:
    """The pieces of memory that this process has registered for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: dict[int, int] = {}
        self._refused = False

    @property
    def complete(self) -> bool:
        """Whether all memory that was given could be registered."""
        return not self._refused

    def add(self, memory: torch.Tensor) -> None:
        """Registers a flat CPU tensor's memory, once."""
        address, size_bytes = memory.data_ptr(), memory.numel() * memory.element_size()
        if address in self._addresses or self._refused or not size_bytes:
            return
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()
            self._refused = int(runtime.cudaHostRegister(address, size_bytes, 0)) != 0
        if not self._refused:
            self._addresses[address] = size_bytes

    def close(self) -> None:
        """Gives everything back."""
        if self._addresses:
            torch.cuda.synchronize(self._device)
            runtime: Any = torch.cuda.cudart()
            for address in self._addresses:
                runtime.cudaHostUnregister(address)
        self._addresses.clear()
