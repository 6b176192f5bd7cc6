"""Asks ps task 0 how the run is doing: used by the live view and by `torchquorum status`. Imports no torch."""

from __future__ import annotations

import os
import time
from typing import Any

import torchquorum.transport.messages as m
from torchquorum.transport import codec
from torchquorum.transport.zmq_channel import ZmqChannel


class Watcher:
    """Polls a run's status without ever blocking."""

    def __init__(self, address: str, every_s: float = 0.5) -> None:
        self._channel = ZmqChannel(address, f"watch/{os.getpid()}/{time.monotonic_ns():x}".encode())
        self.every_s, self._asked_at = every_s, 0.0
        self.status: dict[str, Any] = {}

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Asks if it is time to, takes what has come; returns whether something has."""
        now = time.monotonic()
        if now - self._asked_at >= self.every_s:
            self._asked_at = now
            self._channel.send([codec.encode(m.StatusRequest())])
        news = False
        while (frames := self._channel.receive(0.0 if news else timeout_s)) is not None:
            message, _ = codec.split(frames)
            if isinstance(message, m.Status):
                self.status, news = message.body, True
        return news

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()
