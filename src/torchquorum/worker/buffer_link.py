"""A worker's connection to ps task 0 for its buffers, which may be larger than a door lets through.

Owned by the worker's thread, through its client. What always holds: the connection is made when it is first needed; nothing is
sent unasked but at the worker's end; a wait for the run's buffers ends with them or with an error.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable

import torch

import torchquorum.transport.messages as m
from torchquorum.transport import codec
from torchquorum.transport.channel import Channel
from torchquorum.transport.memory import frame_tensor, tensor_frame
from torchquorum.worker.buffers import CapturedBuffers, LocalBuffers
from torchquorum.worker.faults import error_of

POLL_S = 0.02
ASK_S = 1.0


class BufferLink:
    """Gives a worker's buffers to ps task 0, and takes the run's.

    Args:
        connect: Makes the channel.
        worker: The worker's index.
        incarnation: Its life.
        local: Its buffers.
    """

    def __init__(self, connect: Callable[[], Channel], worker: int, incarnation: int, local: LocalBuffers) -> None:
        self._connect, self._worker, self._incarnation, self.local = connect, worker, incarnation, local
        self._channel: Channel | None = None
        self._final = False

    def give(self, version: int, captured: CapturedBuffers, *, number: int = -1, final: bool = False) -> None:
        """Sends buffers as they were captured."""
        message = m.Buffers(self._worker, self._incarnation, version, number, final)
        self._open().send([codec.encode(message), tensor_frame(captured.pack())])

    def give_final(self, version: int) -> None:
        """Sends the buffers once more, when the run is over: what they are now they stay."""
        if not self._final:
            self._final = True
            self.give(version, self.local.capture(), final=True)

    def take(self, version: int, *, joining: bool, waiting: Callable[[float, float], bool]) -> dict[str, torch.Tensor]:
        """Asks for the run's buffers and waits for them.

        Args:
            version: What the worker holds.
            joining: Whether it is about to begin, and has none of its own that count.
            waiting: Is called again and again with the seconds waited, and those since the ps was last heard; says whether
                it has heard from it, or raises.

        Returns:
            The buffers by name.
        """
        number = secrets.randbits(48)
        request = [codec.encode(m.TakeBuffers(self._worker, self._incarnation, number, joining))]
        channel, mine = self._open(), self.local.capture()
        started = heard = time.monotonic()
        asked = -math.inf
        while True:
            now = time.monotonic()
            if now - asked >= ASK_S:
                asked = now
                if not joining:  # what this worker itself has belongs to the run too
                    self.give(version, mine, number=number)
                channel.send(request)
            received = channel.receive(POLL_S)
            if received is not None:
                heard = time.monotonic()
                answer, frames = codec.split(received)
                if isinstance(answer, m.RunBuffers) and answer.number == number:
                    memory = frame_tensor(frames[0], self.local.packing.size_bytes)
                    return self.local.packing.views(memory)
                if isinstance(answer, m.Fault):
                    raise error_of(answer)
            elif waiting(now - started, now - heard):
                heard = now

    def close(self) -> None:
        """Closes the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open(self) -> Channel:
        if self._channel is None:
            self._channel = self._connect()
        return self._channel
