"""int8 and int4 with a scale for each block of numbers.

For a block x with the largest magnitude a, and L = 127 or 7 levels: q = round(x * L / a), decoded = q * a / L. The error of a number is
at most a / (2 L), and rounding of float32. See Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization.

Work goes through pieces that stay in the cache. Layout of a message: the scales of all blocks in float32, then the numbers; the last
block is filled up with zeros. int4 has two numbers in a byte, the first in the lower half.
"""

from __future__ import annotations

import torch

PIECE = 1 << 16  # numbers that are worked on at a time
MOST = 3.4028e38  # a little below float32's largest number, so that what is decoded stays finite


class Blockwise:
    """What int8 and int4 share: scales of blocks.

    Attributes:
        block: How many numbers share a scale.
        levels: The largest code.
    """

    block = 256
    levels = 127

    def __init__(self) -> None:
        self._rooms: dict[torch.device, torch.Tensor] = {}

    def size_bytes(self, numel: int) -> int:
        """Returns how many bytes that many numbers take."""
        blocks = -(-numel // self.block)
        return 4 * blocks + self._bytes_of(blocks * self.block)

    def _bytes_of(self, numel: int) -> int:
        return numel

    def _put(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Writes codes, whole numbers in float32, as bytes; `codes` may be overwritten."""
        out.view(torch.int8).copy_(codes)

    def _get(self, data: torch.Tensor, codes: torch.Tensor) -> None:
        """Reads codes from bytes."""
        codes.copy_(data.view(torch.int8))

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the values into `out`."""
        blocks = -(-values.numel() // self.block)
        scales, codes = out[: 4 * blocks].view(torch.float32), out[4 * blocks :]
        for start in range(0, blocks * self.block, PIECE):
            given = values[start : start + PIECE]
            first, last = start // self.block, -(-(start + given.numel()) // self.block)
            room = self._room(values.device)[: (last - first) * self.block]
            if room.numel() != given.numel():
                room[given.numel() :] = 0.0
            room[: given.numel()] = given
            rows = room.view(-1, self.block)
            scale = scales[first:last]
            torch.amax(rows.abs(), dim=1, out=scale)
            scale.div_(self.levels).clamp_(max=MOST / self.levels)
            # A block of zeros, or of numbers that are too small to be divided by, has the scale 0 and decodes to zeros.
            factor = torch.where(scale > 0, 1.0 / scale, 0.0)
            small = ~torch.isfinite(factor)
            if bool(small.any()):
                factor[small] = 0.0
                scale[small] = 0.0
            rows.mul_(factor.unsqueeze(1)).round_().clamp_(-self.levels, self.levels)
            self._put(room, codes[self._bytes_of(start) : self._bytes_of(start) + self._bytes_of(room.numel())])

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the numbers into `out`.

        Raises:
            ValueError: A scale is not finite.
        """
        blocks = -(-out.numel() // self.block)
        scales, codes = data[: 4 * blocks].view(torch.float32), data[4 * blocks :]
        if not bool(torch.isfinite(scales).all()):
            raise ValueError("a scale of a compressed gradient is not finite")
        for start in range(0, blocks * self.block, PIECE):
            target = out[start : start + PIECE]
            first, last = start // self.block, -(-(start + target.numel()) // self.block)
            room = self._room(out.device)[: (last - first) * self.block]
            self._get(codes[self._bytes_of(start) : self._bytes_of(start) + self._bytes_of(room.numel())], room)
            room.view(-1, self.block).mul_(scales[first:last].unsqueeze(1))
            target.copy_(room[: target.numel()])

    def _room(self, device: torch.device) -> torch.Tensor:
        room = self._rooms.get(device)
        if room is None:
            room = self._rooms[device] = torch.empty(PIECE, dtype=torch.float32, device=device)
        return room


class Int8(Blockwise):
    """One byte a number and four a block of 256: 3.9 times fewer bytes."""


class Int4(Blockwise):
    """Half a byte a number and four a block of 128: 7.5 times fewer bytes."""

    block = 128
    levels = 7

    def _bytes_of(self, numel: int) -> int:
        return numel // 2

    def _put(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        # 8 + code lies in 1 to 15; the sum of a pair is whole and below 256, which float32 holds exactly.
        pairs = codes.view(-1, 2)
        both = torch.add(pairs[:, 0], pairs[:, 1], alpha=16)
        out.copy_(both.add_(8 + 8 * 16))

    def _get(self, data: torch.Tensor, codes: torch.Tensor) -> None:
        pairs = codes.view(-1, 2)
        pairs[:, 0] = data & 15
        pairs[:, 1] = data >> 4
        codes.sub_(8.0)
