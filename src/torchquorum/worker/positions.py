"""Where a worker stood when it first held each of its last versions; sent to shard 0 for a checkpoint.

Owned by the worker's thread, through its link. What always holds: a position is captured once per version, before anything
is computed at it, and encoded only when it is wanted; before `begin` nothing is captured and nothing sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torchquorum.wire.messages as m
from torchquorum.worker.local_buffers import CapturedBuffers
from torchquorum.worker.ps_channels import PsChannels

REMEMBERED = 4


class CapturedPosition(Protocol):
    """A worker's position, with its buffers, captured cheaply and made JSON-able only when it is wanted."""

    buffers: CapturedBuffers | None

    def encode(self) -> dict[str, Any]:
        """Returns the position in JSON's types."""
        ...


class Positions:
    """The positions of the last few versions.

    Attributes:
        send_buffers: Sends the buffers that were captured with a position, at its version.
    """

    def __init__(self, channels: PsChannels) -> None:
        self._channels = channels
        self.send_buffers: Callable[[int, CapturedBuffers], None] = lambda _version, _buffers: None
        self._capture: Callable[[], CapturedPosition] | None = None
        self._kept: dict[int, CapturedPosition] = {}

    def begin(self, capture: Callable[[], CapturedPosition], version: int) -> None:
        """From now on captures the position at every new version; now for the first time."""
        self._capture, self._kept = capture, {version: capture()}

    def note(self, version: int) -> None:
        """Captures the position at a version, if it is new."""
        if self._capture is not None and version not in self._kept:
            self._kept[version] = self._capture()
            while len(self._kept) > REMEMBERED:
                del self._kept[min(self._kept)]

    def send(self, wanted: int) -> None:
        """Sends the newest position that is no newer than a version, if there is one."""
        found = max((version for version in self._kept if version <= wanted), default=None)
        if found is not None:
            position, end = self._kept[found], self._channels.end
            self._channels.post(0, m.Position(end.index, end.incarnation, found, position.encode()))
            if position.buffers is not None:
                self.send_buffers(found, position.buffers)
