"""Single tensors as raw frames: dtype and shape in the header, the bytes beside it. For batches, buffers and outputs.

Used by both ends of the conversation between a client and its compute tasks. What always holds: a frame becomes a tensor
only if it has exactly the bytes that its dtype and shape say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torchquorum.graph.graph_messages import TensorSpec
from torchquorum.wire.codec import Frame, WireError
from torchquorum.wire.frames import frame_tensor, tensor_frame

_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}
MAX_DIMENSIONS = 64


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name, `float32`; WireError if tensors of it do not travel."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise WireError(f"dtype {name}: tensors of it do not travel; allowed are {', '.join(_DTYPES)}")
    return name


def find_dtype(name: str) -> torch.dtype:
    """Returns the dtype of a name that came over the wire."""
    if name not in _DTYPES:
        raise WireError(f"dtype {name[:40]!r}: allowed are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def pack(tensors: Sequence[torch.Tensor], *, copy: bool) -> tuple[list[TensorSpec], list[Frame]]:
    """Returns tensors as what travels; with `copy`, the frames stay as they are whatever happens to the tensors."""
    specs: list[TensorSpec] = []
    frames: list[Frame] = []
    for given in tensors:
        specs.append(TensorSpec(dtype_name(given.dtype), list(given.shape)))
        flat = given.detach().cpu().contiguous().reshape(-1)
        flat = flat.clone() if copy and flat.data_ptr() == given.data_ptr() else flat
        frames.append(tensor_frame(flat.resolve_conj().resolve_neg().view(torch.uint8)) if flat.numel() else b"")
    return specs, frames


def unpack(specs: Sequence[TensorSpec], frames: Sequence[Frame]) -> list[torch.Tensor]:
    """Returns the tensors in frames; they may share memory with the frames, so they are not to be written to.

    Raises:
        WireError: There are more or fewer frames than tensors, or one has the wrong size.
    """
    if len(specs) != len(frames):
        raise WireError(f"{len(frames)} tensor frames, expected {len(specs)}")
    return [_unpack(spec, frame) for spec, frame in zip(specs, frames, strict=True)]


def _unpack(spec: TensorSpec, frame: Frame) -> torch.Tensor:
    dtype = find_dtype(spec.dtype)
    if len(spec.shape) > MAX_DIMENSIONS or any(d < 0 for d in spec.shape):
        raise WireError(f"shape {spec.shape[:8]}: must have at most {MAX_DIMENSIONS} dimensions, each 0 or more")
    size_bytes = math.prod(spec.shape) * dtype.itemsize
    if len(frame) != size_bytes:
        raise WireError(f"tensor frame of {len(frame)} bytes, expected {size_bytes} for {spec.dtype} {spec.shape}")
    if size_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return frame_tensor(frame, size_bytes).view(dtype).reshape(spec.shape)
