"""A worker's sign of life, from a thread of its own, so that a long batch is not taken for a death.

Started and stopped by the session. Uses a channel that nobody else uses; shares nothing with the worker's thread but a
flag to stop and three values that only this thread writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torchquorum.wire.messages as m
from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire import codec
from torchquorum.wire.channel import Channel

INTERVAL_S = 1.0
ANSWER_S = 0.2


class Heartbeat:
    """Says every second that the worker is alive.

    Attributes:
        lead: The worker that does what is the chief's to do, as ps task 0 last said; may be read on any thread.
        leave: Whether ps task 0 has asked this worker to go; may be read on any thread.
        answered: How often ps task 0 has answered; may be read on any thread.
    """

    def __init__(
        self,
        channel: Channel,
        worker: int,
        incarnation: int,
        interval_s: float = INTERVAL_S,
        lead: int = 0,
        clock: Clock = SYSTEM,
        thread: Callable[..., threading.Thread] = threading.Thread,
    ) -> None:
        self._channel, self._interval_s, self._clock = channel, interval_s, clock
        self._message = codec.encode(m.Beat(worker, incarnation))
        self.lead, self.leave, self.answered = lead, False, 0
        self._stop = threading.Event()
        self._thread = thread(target=self._run, name="torchquorum-beat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._clock.wait(self._stop, self._interval_s):
            if not self._channel.progress().leaving:  # one that is still on its way says the same
                self._channel.send([self._message])
            wait_s = ANSWER_S  # a connection that is just being made goes on while somebody waits for it
            while (received := self._channel.receive(wait_s)) is not None:
                wait_s = 0.0
                answer, _ = codec.split(received)
                if isinstance(answer, m.Alive):
                    self.lead, self.leave = answer.lead, answer.leave
                    self.answered += 1
        self._channel.close()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)
