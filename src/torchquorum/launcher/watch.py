"""Asks ps task 0 how the run is doing: used by the live view and by `torchquorum status`. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torchquorum.transport.messages as m
from torchquorum.cluster.secret import Access, read_access
from torchquorum.transport import codec
from torchquorum.transport.zmq_channel import ZmqChannel


class Watcher:
    """Polls a run's status without ever blocking.

    Args:
        address: Where ps task 0 listens.
        every_s: How often to ask.
        access: The cluster's secret, if it has one; None takes that of the environment.
    """

    def __init__(self, address: str, every_s: float = 0.5, access: Access | None = None) -> None:
        name = f"watch/{os.getpid()}/{time.monotonic_ns():x}".encode()
        self._channel = ZmqChannel(address, name, read_access() if access is None else access, "/job:ps/task:0")
        self.every_s, self._asked_at = every_s, 0.0
        self.status: dict[str, Any] = {}

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Asks if it is time to, takes what has come; returns whether something has.

        Raises:
            SecretError: The ps does not let us in.
        """
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

    def wait(self, timeout_s: float) -> bool:
        """Asks until an answer has come; returns whether it did in time.

        Raises:
            SecretError: The ps does not let us in.
        """
        deadline = time.monotonic() + timeout_s
        while not self.poll(min(0.2, timeout_s)):
            if time.monotonic() > deadline:
                return False
        return True

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()


class RunWatcher:
    """Polls the status of a run whose ps task 0 may not be there yet, or may move.

    Args:
        where: Returns where ps task 0 listens by now, or None.
        every_s: How often to ask.
        access: Returns the cluster's secret, once the address is known.
    """

    def __init__(
        self, where: Callable[[], str | None], every_s: float = 0.5, access: Callable[[], Access] = read_access
    ) -> None:
        self._where, self._every_s, self._access = where, every_s, access
        self._watched: str | None = None
        self._watcher: Watcher | None = None
        self.status: dict[str, Any] = {}

    def poll(self) -> bool:
        """Asks if it is time to, takes what has come; returns whether something has.

        Raises:
            SecretError: The ps does not let us in.
        """
        address = self._where()
        if address != self._watched:
            self.close()
            self._watched = address
            self._watcher = Watcher(address, self._every_s, self._access()) if address is not None else None
        if self._watcher is None or not self._watcher.poll():
            return False
        self.status = self._watcher.status
        return True

    def close(self) -> None:
        """Closes the connection."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
