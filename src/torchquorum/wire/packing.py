"""A model's buffers in one flat piece of memory, as they travel between a worker and ps task 0.

Used by both sides, which compute the same places from the plan's list. What always holds: each buffer starts on a cache
line; a frame of another size is refused by the task that opens it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from torchquorum.formats.checkpoint_manifest import DTYPES, torch_dtype
from torchquorum.wire.messages import BufferSpec

ALIGN_BYTES = 64
MODES = ("chief", "average", "local")


class Packing:
    """Where each buffer lies.

    Raises:
        ValueError: A buffer has a dtype that is not known, or a shape that cannot be, or two have the same name.
    """

    def __init__(self, specs: Sequence[BufferSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        if len(self.specs) != len(specs):
            raise ValueError("two buffers have the same name")
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for spec in specs:
            if spec.dtype not in DTYPES or any(size < 0 for size in spec.shape):
                raise ValueError(f"buffer {spec}: allowed are sizes of 0 or more and {', '.join(DTYPES)}")
            size_bytes = prod(spec.shape) * torch_dtype(spec.dtype).itemsize
            self._places[spec.name] = (at, at + size_bytes)
            at += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.size_bytes = at

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns each buffer in its shape, as a view of packed memory."""
        assert len(memory) == self.size_bytes, (len(memory), self.size_bytes)
        return {
            name: memory[start:stop].view(torch_dtype(self.specs[name].dtype)).view(self.specs[name].shape)
            for name, (start, stop) in self._places.items()
        }

    def pack(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns new memory with the buffers in it; what lies between them is zero."""
        memory = torch.zeros(self.size_bytes, dtype=torch.uint8)
        for name, view in self.views(memory).items():
            view.copy_(values[name])
        return memory
