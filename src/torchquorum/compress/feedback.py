"""What compression loses stays with the worker, and is part of what it sends next: error feedback.

For what is given, g, and the residual r (zero at first): sent = decode(encode(g + r)), r = g + r - sent. See Karimireddy et al. 2019,
Error Feedback Fixes SignSGD. What always holds: sent + r equals g + r before, up to one rounding of float32 in each of the two sums.
"""

from __future__ import annotations

import torch

from torchquorum.compress.compressor import Compressor


class Feedback:
    """Compresses what is given, one message after another, and keeps what each has lost.

    Args:
        compressor: What makes the bytes.
        numel: How many numbers a message has.
        device: Where they are.

    Attributes:
        residual: What has not been sent yet.
        message: The bytes of the last message.
    """

    def __init__(self, compressor: Compressor, numel: int, device: torch.device | str = "cpu") -> None:
        self._compressor = compressor
        self.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self.message = torch.zeros(compressor.size_bytes(numel), dtype=torch.uint8, device=device)

    def send(self, given: torch.Tensor, sent: torch.Tensor) -> None:
        """Encodes what is given, and what was left; writes what the receiver will decode into `sent`, which may be `given`."""
        self.residual.add_(given)
        self._compressor.encode(self.residual, self.message)
        decoded = (
            sent
            if sent.dtype == torch.float32 and sent.data_ptr() != given.data_ptr()
            else torch.empty_like(self.residual)
        )
        self._compressor.decode(self.message, decoded)
        self.residual.sub_(decoded)
        if decoded is not sent:
            sent.copy_(decoded)

    def give_back(self, unused: torch.Tensor) -> None:
        """What was sent has not been used: it is part of the next message."""
        self.residual.add_(unused)
