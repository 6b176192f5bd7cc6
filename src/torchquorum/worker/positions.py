"""Where a worker stood when it first held each of its last versions; given to shard 0 for a checkpoint.

Owned by the worker's thread, through its client. What always holds: a position is taken once per version, before anything
is computed at it, and encoded only when it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torchquorum.worker.buffers import CapturedBuffers

REMEMBERED = 4


class Position(Protocol):
    """A worker's position, with its buffers, taken cheaply and made JSON-able only when it is wanted."""

    buffers: CapturedBuffers | None

    def encode(self) -> dict[str, Any]:
        """Returns the position in JSON's types."""
        ...


class Positions:
    """The positions of the last few versions; `capture` takes one."""

    def __init__(self, capture: Callable[[], Position], version: int) -> None:
        self._capture = capture
        self._kept: dict[int, Position] = {version: capture()}

    def note(self, version: int) -> None:
        """Takes the position at a version, if it is new."""
        if version not in self._kept:
            self._kept[version] = self._capture()
            while len(self._kept) > REMEMBERED:
                del self._kept[min(self._kept)]

    def at(self, version: int) -> tuple[int, Position] | None:
        """Returns the newest position that is no newer than a version, and its version."""
        found = max((v for v in self._kept if v <= version), default=None)
        return (found, self._kept[found]) if found is not None else None
