"""What the summary thread asks the ps tasks: how the run is doing, and the mean gradient of a recent update.

Owned by the summary thread, on channels of its own, so that no training step waits for an answer. What always holds: an
answer that does not come soon is done without.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import torchquorum.transport.messages as m
from torchquorum.transport import codec
from torchquorum.transport.channel import Channel
from torchquorum.transport.codec import Frame

ANSWER_S = 1.0
MEAN_S = 2.0
AGAIN_S = 0.02

_Kind = TypeVar("_Kind", bound=m.Message)


class Asks:
    """Questions to the ps tasks.

    Args:
        connect: Makes a channel to a ps task, by its index.
        num_ps: How many ps tasks there are.
    """

    def __init__(self, connect: Callable[[int], Channel], num_ps: int) -> None:
        self._connect, self._num_ps = connect, num_ps
        self._channels: dict[int, Channel] = {}
        self._newest_mean = -1

    def status(self) -> dict[str, Any]:
        """Returns ps task 0's status, or nothing if it does not answer soon."""
        answer = self._ask(0, m.StatusRequest(), m.Status)
        return answer[0].body if answer is not None else {}

    def mean_gradient(self, wait_s: float = MEAN_S) -> tuple[int, dict[str, np.ndarray]]:
        """Returns the mean gradient of an update since the last time it was asked for, and the version it made.

        A sliced variable is put together from its shards, whose answers may be of neighbouring versions. If there has been
        no update since, nor within `wait_s`, the version is -1 and nothing is returned.
        """
        parts: dict[str, list[tuple[int, np.ndarray]]] = {}
        newest = -1
        for shard in range(self._num_ps):
            found = self._mean_of(shard, wait_s)
            if found is None:
                return -1, {}
            newest = max(newest, found[0].version)
            numbers, at = np.frombuffer(found[1], dtype=np.float32), 0
            for piece in found[0].pieces:
                parts.setdefault(piece.name, []).append((piece.start, numbers[at : at + piece.count]))
                at += piece.count
        self._newest_mean = newest
        joined = {
            name: np.concatenate([values for _, values in sorted(found, key=lambda part: part[0])])
            for name, found in parts.items()
        }
        return newest, joined

    def close(self) -> None:
        """Gives the channels up."""
        for channel in self._channels.values():
            channel.close()

    def _mean_of(self, shard: int, wait_s: float) -> tuple[m.Mean, Frame] | None:
        """Asks until the shard has a mean that is newer than the last: it keeps one only when it was asked."""
        deadline = time.monotonic() + wait_s
        while True:
            answer = self._ask(shard, m.MeanRequest(), m.Mean)
            if answer is not None and answer[0].version > self._newest_mean and answer[1]:
                return answer[0], answer[1][0]
            if answer is None or time.monotonic() > deadline:
                return None
            time.sleep(AGAIN_S)

    def _ask(self, shard: int, question: m.Message, kind: type[_Kind]) -> tuple[_Kind, list[Frame]] | None:
        if shard not in self._channels:
            self._channels[shard] = self._connect(shard)
        channel = self._channels[shard]
        while channel.receive(0.0) is not None:
            pass  # an answer that came too late for the last time
        channel.send([codec.encode(question)])
        deadline = time.monotonic() + ANSWER_S
        while (left := deadline - time.monotonic()) > 0:
            received = channel.receive(left)
            if received is None:
                continue
            answer, frames = codec.split(received)
            if isinstance(answer, kind):
                return answer, frames
            if isinstance(answer, m.Fault):
                return None
        return None
