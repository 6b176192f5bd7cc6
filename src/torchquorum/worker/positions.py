"""Where a worker stood when it first held each of its last versions; sent to shard 0 for a checkpoint.

Owned by the worker's thread, through its link. What always holds: a position is captured once per version, before anything
is computed at it, and encoded only when it is wanted; before `begin` nothing is captured and nothing sent. What is `late` in it, the
schedulers and the settings, is captured at the next push: a position that was sent before that is sent once more.
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

    @property
    def is_late(self) -> bool:
        """Whether some of it is captured later."""
        ...

    def capture_late(self) -> None:
        """Captures that now."""
        ...

    def encode(self) -> dict[str, Any]:
        """Returns the position in JSON's types."""
        ...

    def save_beside(self, version: int) -> None:
        """Saves what belongs to it and stays with the worker."""
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
        self._holds, self._sent_early, self._at_loop = -1, -1, -1

    def begin(self, capture: Callable[[], CapturedPosition], version: int) -> None:
        """From now on captures the position at every new version; now for the first time."""
        self._capture, self._kept, self._holds = capture, {version: capture()}, version

    def note(self, version: int) -> None:
        """Captures the position at a version, if it is new."""
        if self._capture is not None and version not in self._kept:
            self._kept[version], self._holds = self._capture(), version
            while len(self._kept) > REMEMBERED:
                del self._kept[min(self._kept)]

    def renew(self, version: int) -> None:
        """Captures the position at the current version once more: the program has gone on in its data without a push."""
        if self._capture is not None and self._kept:
            self._kept[version], self._holds = self._capture(), version

    def at_loop(self, version: int) -> None:
        """The program's loop begins anew, for the first time at this version if it is new."""
        if version != self._at_loop:
            self._at_loop = version
            self.renew(version)

    def before_push(self) -> None:
        """The program has done what it does between two steps: what was left open is captured, and sent if it is wanted."""
        position = self._kept.get(self._holds)
        if position is not None and position.is_late:
            position.capture_late()
            wanted, self._sent_early = self._sent_early, -1
            if wanted == self._holds:
                self._post(wanted, position, final=True)
            self._holds = -1

    def send(self, wanted: int, *, final: bool = False) -> None:
        """Sends the newest position that is no newer than a version, if there is one.

        Args:
            wanted: The version.
            final: Whether there may be no push after this: the schedulers are as they are now.
        """
        found = max((version for version in self._kept if version <= wanted), default=None)
        if found is not None:
            position = self._kept[found]
            early = position.is_late and found == self._holds
            if early:
                position.capture_late()
                self._sent_early = found
            position.save_beside(found)
            self._post(found, position, final=final or not early)
            if position.buffers is not None:
                self.send_buffers(found, position.buffers)

    def _post(self, version: int, position: CapturedPosition, *, final: bool) -> None:
        end = self._channels.end
        self._channels.post(0, m.Position(end.index, end.incarnation, version, position.encode(), final))
