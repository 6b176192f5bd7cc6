"""What a compressor is, and how one is named: fewer bytes for flat float32 numbers, decoded to numbers that are close to them.

Used by the worker, which keeps what was lost (`torchquorum.compress.feedback`), and by the ps, which only decodes. What always holds:
the size of a message follows from the number of numbers alone; encoding is deterministic; decoding damaged bytes gives numbers or a
ValueError, never more memory than the numbers need.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import torch

from torchquorum.compress.bfloat16 import Bfloat16
from torchquorum.compress.blocks import Int4, Int8
from torchquorum.compress.top_k import TopK, read_top_k
from torchquorum.errors import ConfigError

FORMS = "int8, int4, bfloat16, topk:K/N, topk:K/N+2bit"


class Compressor(Protocol):
    """Turns float32 numbers into fewer bytes and back."""

    def size_bytes(self, numel: int) -> int:
        """Returns how many bytes that many numbers take."""
        ...

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes flat, finite float32 values into `out`, uint8 of exactly `size_bytes`, on the same device."""
        ...

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the numbers that bytes stand for into `out`, flat float32.

        Raises:
            ValueError: The bytes are none that `encode` writes.
        """
        ...


_PLAIN: dict[str, Callable[[], Compressor]] = {"int8": Int8, "int4": Int4, "bfloat16": Bfloat16}


def read_compressor(text: str) -> Compressor:
    """Returns the compressor of a name, such as `int8` or `topk:64/4096+2bit`.

    Raises:
        ConfigError: There is none of that name.
    """
    name = text.strip().lower().replace(" ", "") if isinstance(text, str) else ""
    if name in _PLAIN:
        return _PLAIN[name]()
    if match := re.fullmatch(r"topk:(\d{1,9})/(\d{1,9})(\+2bit)?", name):
        return read_top_k(text, int(match[1]), int(match[2]), two_bit=bool(match[3]))
    raise ConfigError(f"compress={text!r}: allowed are {FORMS}, such as topk:64/4096+2bit")


__all__ = ["FORMS", "Bfloat16", "Compressor", "Int4", "Int8", "TopK", "read_compressor"]
