"""The K largest of every N numbers, and nothing of the others.

For each chunk of N numbers the K of the largest magnitude are sent, with their places; the others decode to zero. What was not sent
stays with the worker and is part of the next message (`torchquorum.compress.feedback`), as in Aji and Heafield 2017, Sparse
Communication for Distributed Gradient Descent, and, by chunks and with two bits, SparseLoCo (Sarfi et al. 2025).

Without more a number is sent as bfloat16. With `+2bit` it is sent as its sign and one bit more: whether its magnitude is above the
chunk's mean magnitude of those sent; a chunk has two levels, the means of the lower and of the upper magnitudes.

Layout of a message: with 2 bits the levels of each chunk (two bfloat16), then the places (12 bits each where N is at most 4096, else 16),
then the numbers (2 bytes or 2 bits each). The last chunk is filled up with zeros.
"""

from __future__ import annotations

import torch

from torchquorum.compress.bfloat16 import LARGEST, PIECE
from torchquorum.errors import ConfigError

MOST = 1 << 16
GROUP = 8  # neighbours of which the largest is looked at first


def read_top_k(text: str, kept: int, chunk: int, *, two_bit: bool) -> TopK:
    """Returns the compressor that keeps `kept` of each `chunk`.

    Raises:
        ConfigError: The numbers do not fit.
    """
    if not 1 <= kept <= chunk or not 8 <= chunk <= MOST or kept % 4:
        raise ConfigError(
            f"compress={text!r}: topk:K/N keeps K of every N numbers; K must be a multiple of 4 and at most N, N 8 to {MOST}, such as "
            "topk:64/4096"
        )
    return TopK(kept, chunk, two_bit=two_bit)


class TopK:
    """Keeps `kept` of each `chunk` numbers."""

    def __init__(self, kept: int, chunk: int, *, two_bit: bool) -> None:
        self._kept, self._chunk, self._two_bit = kept, chunk, two_bit
        self._short = chunk <= 1 << 12
        self._places = kept * 3 // 2 if self._short else kept * 2  # bytes of a chunk's places
        self._numbers = kept // 4 if two_bit else kept * 2
        self._levels = 4 if two_bit else 0

    def size_bytes(self, numel: int) -> int:
        """Returns how many bytes that many numbers take."""
        return -(-numel // self._chunk) * (self._places + self._numbers + self._levels)

    def _parts(self, message: torch.Tensor, chunks: int) -> list[torch.Tensor]:
        sizes = [chunks * self._levels, chunks * self._places, chunks * self._numbers]
        return list(message.split(sizes))

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the values into `out`."""
        chunks = -(-values.numel() // self._chunk)
        rows, at_a_time = self._in_rows(values, chunks), max(1, PIECE // self._chunk)
        room = torch.empty_like(rows[:at_a_time])
        found = [self._largest(torch.abs(row, out=room[: len(row)])) for row in rows.split(at_a_time)]
        places = torch.cat(found).sort(dim=1).values  # the same bytes on every machine
        found = rows.gather(1, places)
        levels, where, numbers = self._parts(out, chunks)
        self._put_places(places, where)
        if self._two_bit:
            self._put_two_bits(found, numbers, levels)
        else:
            numbers.view(torch.bfloat16).copy_(found.clamp(-LARGEST, LARGEST).reshape(-1))

    def _largest(self, size: torch.Tensor) -> torch.Tensor:
        """Returns the places of the largest of each row.

        They lie in those groups of neighbours whose largest number is among the largest of all groups: most of a row need not be ordered.
        """
        groups = self._chunk // GROUP
        if self._chunk % GROUP or self._kept * 2 > groups:
            return size.topk(self._kept, dim=1, sorted=False).indices
        grouped = size.view(-1, groups, GROUP)
        chosen = grouped.amax(dim=2).topk(self._kept, dim=1, sorted=False).indices
        row = torch.arange(len(size), device=size.device).unsqueeze(1) * groups
        near = grouped.view(-1, GROUP).index_select(0, (chosen + row).view(-1)).view(len(size), -1)
        places = near.topk(self._kept, dim=1, sorted=False).indices
        return chosen.gather(1, places // GROUP) * GROUP + places % GROUP

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the numbers into `out`.

        Raises:
            ValueError: A place lies outside of its chunk, or a number is not finite.
        """
        chunks = -(-out.numel() // self._chunk)
        levels, where, numbers = self._parts(data, chunks)
        places = self._get_places(where, chunks)
        if int(places.amax()) >= self._chunk:
            raise ValueError("a place in a compressed gradient lies outside of its chunk")
        if self._two_bit:
            found = self._get_two_bits(numbers, levels, chunks)
        else:
            found = numbers.view(torch.bfloat16).to(torch.float32).view(chunks, self._kept)
        if not bool(torch.isfinite(found).all()):
            raise ValueError("a number of a compressed gradient is not finite")
        whole = out.numel() == chunks * self._chunk
        rows = out.view(chunks, self._chunk) if whole else out.new_empty(chunks, self._chunk)
        rows.zero_().scatter_(1, places, found)
        if not whole:
            out.copy_(rows.view(-1)[: out.numel()])

    def _in_rows(self, values: torch.Tensor, chunks: int) -> torch.Tensor:
        if values.numel() == chunks * self._chunk:
            return values.view(chunks, self._chunk)
        rows = values.new_zeros(chunks * self._chunk)
        rows[: values.numel()] = values
        return rows.view(chunks, self._chunk)

    def _put_places(self, places: torch.Tensor, out: torch.Tensor) -> None:
        if not self._short:
            out.view(torch.int16).copy_(torch.where(places < 1 << 15, places, places - (1 << 16)).reshape(-1))
            return
        first, second = places.reshape(-1, 2).unbind(1)
        out.copy_(torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], dim=1).reshape(-1))

    def _get_places(self, data: torch.Tensor, chunks: int) -> torch.Tensor:
        if not self._short:
            return (data.view(torch.int16).to(torch.int64) & 65535).view(chunks, self._kept)
        a, b, c = data.to(torch.int64).view(-1, 3).unbind(1)
        return torch.stack([a | ((b & 15) << 8), (b >> 4) | (c << 4)], dim=1).view(chunks, self._kept)

    def _put_two_bits(self, found: torch.Tensor, numbers: torch.Tensor, levels: torch.Tensor) -> None:
        size = found.abs()
        upper = size > size.mean(dim=1, keepdim=True)
        above = upper.sum(dim=1)
        low = torch.where(upper, 0.0, size).sum(dim=1) / (self._kept - above).clamp_min(1)
        high = torch.where(upper, size, 0.0).sum(dim=1) / above.clamp_min(1)
        levels.view(torch.bfloat16).copy_(torch.stack([low, high], dim=1).clamp(max=LARGEST).reshape(-1))
        codes = (upper.to(torch.uint8) | ((found < 0).to(torch.uint8) << 1)).view(-1, 4)
        numbers.copy_(codes[:, 0] | (codes[:, 1] << 2) | (codes[:, 2] << 4) | (codes[:, 3] << 6))

    def _get_two_bits(self, numbers: torch.Tensor, levels: torch.Tensor, chunks: int) -> torch.Tensor:
        codes = torch.stack([(numbers >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).view(chunks, self._kept)
        pair = levels.view(torch.bfloat16).to(torch.float32).view(chunks, 2)
        size = torch.where((codes & 1).bool(), pair[:, 1:], pair[:, :1])
        return torch.where((codes & 2).bool(), -size, size)
