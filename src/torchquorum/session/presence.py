"""Tells the ps tasks, between two sessions of one program, that the program goes on, so that they wait for the next session.

Owned by the task of a worker, in a cluster of separate processes. A thread says it every second, from the end of a session to the
beginning of the next or the end of the program. What always holds: a program that has ended is known to have, at once if it ended
by itself, and after `STAY_S` of silence (`torchquorum.server.staying`) otherwise.
"""

from __future__ import annotations

import atexit
import secrets
import threading
from collections.abc import Callable

import torchquorum.wire.messages as m
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec
from torchquorum.wire import codec
from torchquorum.wire.entry_channel import EntryChannel

INTERVAL_S = 1.0
GOODBYE_S = 1.0  # at the end of the program, for connections that are just being made


class Presence:
    """One worker's program between its sessions.

    Args:
        cluster: Who exists.
        worker: Which worker this is.
        connect: Makes a channel to a ps task.
        clock: Tells the time.

    Attributes:
        generation: Which creation of the variables the last session was of; None before the first has ended.
    """

    def __init__(
        self, cluster: ClusterSpec, worker: int, connect: Callable[[str, bytes], EntryChannel], clock: Clock = SYSTEM
    ) -> None:
        self._cluster, self._worker, self._connect, self._clock = cluster, worker, connect, clock
        self.generation: int | None = None
        self._stop = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def begin(self, generation: int) -> None:
        """A session has ended, whose variables were of this creation, and the program goes on."""
        self.generation = generation
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="torchquorum-stay", daemon=True)
            self._thread.start()
            atexit.register(self.end)

    def pause(self) -> None:
        """A session has begun."""
        if self._thread is not None:
            atexit.unregister(self.end)
            self._stop.set()
            self._thread.join(timeout=2 * GOODBYE_S)
            self._thread = None

    def end(self) -> None:
        """The program ends."""
        self._over = True
        self.pause()

    def _run(self) -> None:
        name = f"stay/{self._worker}/{secrets.token_hex(8)}".encode()
        channels = [self._connect(self._cluster.address(ps), name) for ps in self._cluster.tasks("ps")]
        while True:
            stopped = self._stop.is_set()
            message = codec.encode(m.Stay(self._worker, self._over))
            for channel in channels:
                if not stopped or self._over:
                    channel.send([message])
                    channel.receive(0.01)  # a connection that is just being made goes on while somebody waits for it
            if stopped:
                break
            self._clock.wait(self._stop, INTERVAL_S)
        until = self._clock.now() + GOODBYE_S
        for channel in channels:
            while self._over and not channel.is_connected and self._clock.now() < until:
                channel.receive(0.05)  # with the connection goes what was sent
            channel.flush(max(0.0, until - self._clock.now()))
            channel.close()
