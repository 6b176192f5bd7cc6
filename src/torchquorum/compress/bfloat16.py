"""bfloat16: half of the bytes. The numbers are rounded to 8 bits of precision, to the nearest, ties to even."""

from __future__ import annotations

import torch

LARGEST = 3.3895313892515355e38  # the largest finite bfloat16
PIECE = 1 << 18  # numbers that are worked on at a time, so that they stay in the cache


class Bfloat16:
    """decoded = bfloat16(x); a finite number stays finite. The relative error is at most 2^-9, for numbers that are not tiny."""

    def size_bytes(self, numel: int) -> int:
        """Returns how many bytes that many numbers take."""
        return 2 * numel

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the values into `out`."""
        target = out.view(torch.bfloat16)
        for start in range(0, values.numel(), PIECE):
            given = values[start : start + PIECE]
            least, most = torch.aminmax(given)
            if max(-float(least), float(most)) > LARGEST:  # rounding would make infinity of it
                given = given.clamp(-LARGEST, LARGEST)
            target[start : start + PIECE].copy_(given)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the numbers into `out`.

        Raises:
            ValueError: One is not finite.
        """
        given = data.view(torch.bfloat16)
        for start in range(0, out.numel(), PIECE):
            target = out[start : start + PIECE]
            target.copy_(given[start : start + PIECE])
            least, most = torch.aminmax(target)
            if not -float(least) <= LARGEST or not float(most) <= LARGEST:
                raise ValueError("a number of a compressed gradient is not finite")
