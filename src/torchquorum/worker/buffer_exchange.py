"""A worker's buffers and the run's: what goes between the model and ps task 0.

Owned by the worker's thread, through its link. What always holds: nothing is sent unasked but at the worker's end; a wait for the
run's buffers ends with them or with an error.
"""

from __future__ import annotations

import torch

import torchquorum.wire.messages as m
from torchquorum.wire.frames import frame_tensor, tensor_frame
from torchquorum.worker.local_buffers import CapturedBuffers, LocalBuffers
from torchquorum.worker.ps_channels import PsChannels
from torchquorum.worker.run_view import RunView

LEAVE_S = 1.0


class BufferExchange:
    """Sends a worker's buffers to ps task 0, and takes the run's.

    Args:
        channels: The worker's channels to the ps tasks.
        view: Where the worker stands.
        local: Its buffers.
    """

    def __init__(self, channels: PsChannels, view: RunView, local: LocalBuffers) -> None:
        self._channels, self._view, self.local = channels, view, local
        self._final = False

    def send(self, version: int, captured: CapturedBuffers, *, number: int = -1, final: bool = False) -> None:
        """Sends buffers as they were captured."""
        end = self._channels.end
        message = m.Buffers(end.index, end.incarnation, version, number, final)
        self._channels.post(0, message, [tensor_frame(captured.pack())])
        self._channels.asker(0).channel.flush(LEAVE_S)  # what has not left by then leaves with the next step

    def send_wanted(self, message: m.Message) -> None:
        """Sends the buffers as they are, if that is what a ps has asked for."""
        if isinstance(message, m.Wanted):
            self.send(self._view.version, self.local.capture(), number=message.number)

    def send_final(self) -> None:
        """Sends the buffers once more, when the run is over: what they are now they stay."""
        if not self._final:
            self._final = True
            self.send(self._view.version, self.local.capture(), final=True)

    def take(self, *, joining: bool) -> dict[str, torch.Tensor]:
        """Asks for the run's buffers and waits for them; meanwhile this worker's own may be asked for.

        Args:
            joining: Whether it is about to begin, and has none of its own that count.

        Returns:
            The buffers by name.
        """
        end = self._channels.end
        request = m.TakeBuffers(end.index, end.incarnation, end.random_bits(48), joining)
        captured = self.local.capture()

        def ask() -> None:
            if not joining:  # what this worker itself has belongs to the run too
                self.send(self._view.version, captured, number=request.number)
            self._channels.post(0, request)

        ask()
        _, frames = self._channels.asker(0).wait(
            m.SharedBuffers,
            lambda answer: answer.number == request.number,
            what="the run's buffers",
            limit_s=end.patience.round_s,
            repeat=ask,
        )
        return self.local.packing.views(frame_tensor(frames[0], self.local.packing.size_bytes))
