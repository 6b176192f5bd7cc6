"""The workers that wait to join: for the creation of the variables, or for the first checkpoint of a durable run.

Owned by the service, which lets them in. What always holds: one waits for each connection, and there is a limit to how many.
"""

from __future__ import annotations

import torchquorum.wire.messages as m
from torchquorum.wire.channel import Peer

MOST_WAITING = 1000


def what_joins_wait_for(request: int, *, created: bool) -> m.Held:
    """Returns what a join is told that cannot be answered yet."""
    if created:
        return m.Held(request, "the first checkpoint, from which a journal goes on", 0, 1, [])
    return m.Held(request, m.CREATION, 0, 1, [0])


class WaitingJoins:
    """Joins that cannot be answered yet, in their order."""

    def __init__(self) -> None:
        self._waiting: dict[Peer, m.Join] = {}

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._waiting

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, peer: Peer, join: m.Join) -> None:
        """Keeps a join; the oldest is dropped when there are too many, and asked again by its worker."""
        self._waiting.pop(peer, None)
        while len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[peer] = join

    def take(self) -> list[tuple[Peer, m.Join]]:
        """Returns, and forgets, all of them."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting.items())
