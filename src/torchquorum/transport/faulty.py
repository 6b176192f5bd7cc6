"""A channel that misbehaves on purpose: drops, delays, duplicates and cuts. For tests.

The faults are drawn from a seeded generator, so a failing test can be repeated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchquorum.transport.channel import Channel
from torchquorum.transport.codec import Frame


@dataclass(kw_only=True)
class Faults:
    """How often a message is lost, sent twice or kept back, in either direction; `cut_at` loses all after that many."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.02
    cut_at: int | None = None
    cut_for: int = 10**9


class FaultyChannel:
    """Wraps a channel; the other side and the user of this one notice nothing but the faults."""

    def __init__(self, inner: Channel, faults: Faults, seed: int = 0) -> None:
        self._inner, self._faults, self._random = inner, faults, random.Random(seed)
        self._count = 0
        self._late: list[tuple[float, bool, list[Frame]]] = []
        self._again: list[list[Frame]] = []

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends a message, once, twice, later or never."""
        self._flush()
        for copy in self._fate(list(frames), outgoing=True):
            self._inner.send(copy)

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message that survives, or None when none came in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._flush()
            if self._again:
                return self._again.pop(0)
            left_s = deadline - time.monotonic()
            frames = self._inner.receive(max(0.0, min(left_s, self._faults.delay_s)))
            if frames is not None:
                self._again += self._fate(frames, outgoing=False)
            elif left_s <= 0:
                return None

    def close(self) -> None:
        """Closes the channel; what is late is lost."""
        self._inner.close()

    def _fate(self, frames: list[Frame], *, outgoing: bool) -> list[list[Frame]]:
        self._count += 1
        faults, draw = self._faults, self._random.random()
        cut = faults.cut_at is not None and faults.cut_at <= self._count < faults.cut_at + faults.cut_for
        if cut or draw < faults.drop:
            return []
        if draw < faults.drop + faults.delay:
            kept: list[Frame] = [bytes(f) for f in frames]  # the sender may use its memory again, as after any send
            self._late.append((time.monotonic() + faults.delay_s, outgoing, kept))
            return []
        return [frames, frames] if draw < faults.drop + faults.delay + faults.duplicate else [frames]

    def _flush(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._late if entry[0] <= now]
        self._late = [entry for entry in self._late if entry[0] > now]
        for _, outgoing, frames in due:
            if outgoing:
                self._inner.send(frames)
            else:
                self._again.append(frames)
