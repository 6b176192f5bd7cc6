"""Bytes of tensors as frames of a message, and back, without a copy where alignment allows."""

from __future__ import annotations

import warnings

import torch

from torchquorum.wire.codec import Frame

warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


def tensor_frame(data: torch.Tensor) -> memoryview:
    """Returns the bytes of a flat uint8 CPU tensor as a frame, without a copy."""
    return memoryview(data.numpy())  # pyright: ignore[reportArgumentType]


def frame_tensor(frame: Frame, size_bytes: int) -> torch.Tensor:
    """Returns a received frame as a flat uint8 tensor, without a copy where its alignment allows.

    Raises:
        ValueError: The frame has another size than expected.
    """
    if len(frame) != size_bytes:
        raise ValueError(f"tensor frame of {len(frame)} bytes, expected {size_bytes}")
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    tensor = torch.frombuffer(frame, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 8 == 0 else tensor.clone()  # no dtype is wider
