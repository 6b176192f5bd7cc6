"""A clock that a test moves by hand, and a channel whose waits move it: whatever waits is tested without waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torchquorum.wire.channel import FOREVER_S, UNKNOWN, Choose, Pieces, Progress, whole
from torchquorum.wire.codec import Frame


class ManualClock:
    """Time passes only in `sleep`, `wait` and `advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def sleep(self, seconds: float, /) -> None:
        self._now += seconds

    advance = sleep

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            self._now += seconds
        return event.is_set()


class Inline:
    """Does a saver's jobs when they are submitted, on the caller's thread."""

    def put(self, job: Callable[[], None]) -> None:
        job()

    def finish(self, timeout_s: float) -> None:
        pass


class ScriptedChannel:
    """A channel whose other side is a function: of what was sent it makes the answers. A wait without one takes its whole time."""

    def __init__(self, clock: ManualClock, answer: Callable[[list[Frame]], list[list[Frame]]]) -> None:
        self._clock, self._answer = clock, answer
        self.sent: list[list[Frame]] = []
        self.arrived: list[list[Frame]] = []
        self.closed = False
        self.moved = UNKNOWN

    def fileno(self) -> int:
        return -1

    def may_wait_s(self) -> float:
        return 0.0 if self.arrived else FOREVER_S

    def receive_into(self, choose: Choose, *, several: bool = False) -> None:
        pass

    def settled(self) -> ScriptedChannel:
        return self

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        self.sent.append(whole(frames))
        self.arrived += self._answer(whole(frames))

    def flush(self, timeout_s: float) -> bool:
        return True

    def progress(self) -> Progress:
        return self.moved

    def receive(self, timeout_s: float) -> list[Frame] | None:
        if self.arrived:
            return self.arrived.pop(0)
        self._clock.advance(timeout_s)
        return None

    def close(self) -> None:
        self.closed = True
