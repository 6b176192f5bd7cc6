"""A channel that misbehaves on purpose: drops, delays, duplicates and cuts. For tests.

The faults are drawn from a seeded generator, so a failing test can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.channel import UNKNOWN, Channel, Choose, Pieces, Progress, whole
from torchquorum.wire.codec import Frame


@dataclass(kw_only=True)
class Faults:
    """How often a message is lost, sent twice or delayed, in either direction; `cut_at` loses all after that many."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.02
    cut_at: int | None = None
    cut_for: int = 10**9


class FaultyChannel:
    """Wraps a channel; the other side and the user of this one notice nothing but the faults."""

    def __init__(self, inner: Channel, faults: Faults, seed: int = 0, clock: Clock = SYSTEM) -> None:
        self._inner, self._faults, self._random, self._clock = inner, faults, random.Random(seed), clock
        self._count = 0
        self._late: list[tuple[float, bool, list[Frame]]] = []
        self._again: list[list[Frame]] = []

    @property
    def closed(self) -> bool:
        """Whether the other side has closed the connection."""
        return self._inner.closed

    def fileno(self) -> int:
        """Returns the descriptor of the channel inside."""
        return self._inner.fileno()

    def may_wait_s(self) -> float:
        """Returns how long to wait before looking again: what is delayed has no descriptor."""
        return 0.0 if self._again else min(self._inner.may_wait_s(), self._faults.delay_s)

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        """Sends a message, once, twice, later or never."""
        self._flush()
        for copy in self._fate(whole(frames), outgoing=True):
            self._inner.send(copy)

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message that survives, or None when none came in time."""
        deadline = self._clock.now() + timeout_s
        while True:
            self._flush()
            if self._again:
                return self._again.pop(0)
            left_s = deadline - self._clock.now()
            frames = self._inner.receive(max(0.0, min(left_s, self._faults.delay_s)))
            if frames is not None:
                self._again += self._fate(frames, outgoing=False)
            elif left_s <= 0:
                return None

    def flush(self, timeout_s: float) -> bool:
        """Sends what the channel inside has not sent yet."""
        return self._inner.flush(timeout_s)

    def progress(self) -> Progress:
        """Returns nothing: what is late or lost here the channel inside does not know of."""
        return UNKNOWN

    def receive_into(self, choose: Choose, *, several: bool = False) -> None:
        """Does nothing: a message that comes twice or late must not write into memory that is used by then."""

    def settled(self) -> FaultyChannel:
        """Returns this channel, around one that is settled."""
        self._inner = self._inner.settled()
        return self

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
            self._late.append((self._clock.now() + faults.delay_s, outgoing, kept))
            return []
        return [frames, frames] if draw < faults.drop + faults.delay + faults.duplicate else [frames]

    def _flush(self) -> None:
        now = self._clock.now()
        due = [entry for entry in self._late if entry[0] <= now]
        self._late = [entry for entry in self._late if entry[0] > now]
        for _, outgoing, frames in due:
            if outgoing:
                self._inner.send(frames)
            else:
                self._again.append(frames)
