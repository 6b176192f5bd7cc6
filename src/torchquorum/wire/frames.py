"""Bytes of tensors as frames of a message, and back, without a copy where alignment allows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

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


def flat_bytes(values: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor as flat uint8; of an empty one too, whose strides, where it comes from numpy, cannot be viewed."""
    flat = values.contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def pack_parts(parts: Sequence[torch.Tensor]) -> Frame:
    """Returns tensors as one frame; each begins at a multiple of eight bytes."""
    flat = [flat_bytes(part) for part in parts]
    if len(flat) == 1 and len(flat[0]) % 8 == 0:
        return tensor_frame(flat[0])
    whole = torch.empty(parts_bytes([len(part) for part in flat]), dtype=torch.uint8)
    write_parts(flat, whole)
    return tensor_frame(whole)


def parts_bytes(sizes: Sequence[int]) -> int:
    """Returns how large a frame is that has parts of so many bytes."""
    return sum(map(_padded, sizes))


def write_parts(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> None:
    """Writes tensors into a flat uint8 tensor of the size that they need; each begins at a multiple of eight bytes."""
    at = 0
    for part in parts:
        size = part.numel() * part.element_size()
        whole[at : at + size].view(part.dtype).view(part.shape).copy_(part)
        whole[at + size : (at := at + _padded(size))] = 0


def cut_parts(frame: Frame, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Returns the parts of a frame, of so many bytes each, as flat uint8 tensors, without a copy where alignment allows.

    Raises:
        ValueError: The frame has another size than expected.
    """
    whole, at, found = frame_tensor(frame, parts_bytes(sizes)), 0, list[torch.Tensor]()
    for size in sizes:
        found.append(whole[at : at + size])
        at += _padded(size)
    return found


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // 8) * 8
