"""Compressed differences of a region: what a ps task sends a reader that holds an older version, and how that is added.

Used by ps tasks and readers, which do exactly the same. What always holds: float32 is compressed, everything else stands there as it is.
"""

from __future__ import annotations

import torch

from torchquorum.compress.compressor import Compressor
from torchquorum.memory.slots import section_views
from torchquorum.placement.layout import Region


def difference_bytes(region: Region, compressor: Compressor) -> int:
    """Returns how large a difference is."""
    return sum(
        compressor.size_bytes(section.numel) if section.dtype == "float32" else section.size_bytes
        for section in region.sections
    )


def make_difference(
    region: Region, compressor: Compressor, now: torch.Tensor, before: torch.Tensor
) -> torch.Tensor | None:
    """Returns what leads from what somebody has to about what is true now; None if numbers are not finite.

    Args:
        region: What is where.
        compressor: Compresses.
        now: The bytes of the region as it is.
        before: The bytes of the region as somebody has it.
    """
    frame, at = torch.zeros(difference_bytes(region, compressor), dtype=torch.uint8), 0
    for section, wanted, had in zip(
        region.sections, section_views(region, now), section_views(region, before), strict=True
    ):
        if section.dtype != "float32":
            frame[at : at + section.size_bytes] = wanted.view(torch.uint8)
            at += section.size_bytes
            continue
        lacking, size = wanted - had, compressor.size_bytes(section.numel)
        if not bool(torch.isfinite(lacking).all()):
            return None
        compressor.encode(lacking, frame[at : at + size])
        at += size
    return frame


def add_difference(region: Region, compressor: Compressor, frame: torch.Tensor, values: torch.Tensor) -> None:
    """Adds a difference to what somebody has.

    Raises:
        ValueError: The difference is damaged.
    """
    if len(frame) != (expected := difference_bytes(region, compressor)):
        raise ValueError(f"a difference of {len(frame)} bytes, expected {expected}")
    at = 0
    for section, view in zip(region.sections, section_views(region, values), strict=True):
        if section.dtype != "float32":
            view.view(torch.uint8).copy_(frame[at : at + section.size_bytes])
            at += section.size_bytes
            continue
        size, decoded = compressor.size_bytes(section.numel), torch.empty(section.numel)
        compressor.decode(frame[at : at + size], decoded)
        view.add_(decoded)
        at += size
