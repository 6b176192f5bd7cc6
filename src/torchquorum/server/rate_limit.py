"""Which peers send too much of what is no part of training: greetings, questions, and what makes no sense.

Owned by the service. What always holds: a flood costs a few hundred answers, then its connection; the counts are bounded by a
second's traffic.
"""

from __future__ import annotations

from torchquorum.wire.channel import Peer

MOST_PER_SECOND = 100


class RateLimit:
    """The counts of this second, by peer.

    Attributes:
        exceeded: The peers to disconnect, taken off by the ps thread.
    """

    def __init__(self) -> None:
        self.exceeded: list[Peer] = []
        self._counts: dict[Peer, int] = {}

    def count(self, peer: Peer) -> None:
        """Counts a message."""
        count = self._counts[peer] = self._counts.get(peer, 0) + 1
        if count == MOST_PER_SECOND:
            self.exceeded.append(peer)

    def reset(self) -> None:
        """A second has passed."""
        self._counts.clear()
