"""Whether shard 0 has to save in the chief's place: a chief that is away asks for no checkpoints.

Owned by the run's checkpoints. What always holds: it saves at once when the chief is gone, then by the clock.
"""

from __future__ import annotations

from torchquorum.rules.quorum import Quorum

STAND_IN_S = 60.0


class StandIn:
    """When shard 0 saves in the chief's place."""

    def __init__(self, quorum: Quorum) -> None:
        self._quorum = quorum
        self._saved_at: float | None = None

    @property
    def chief_has_left(self) -> bool:
        """Whether the chief was there, and is not any more."""
        chief = self._quorum.workers.get(0)
        return chief is not None and not chief.alive

    @property
    def chief_is_away(self) -> bool:
        """Whether the chief died or failed, or was done before others that are still at it."""
        quorum = self._quorum
        chief = quorum.workers.get(0)
        return chief is not None and (chief.gone or (chief.left and quorum.live > 0 and not quorum.stopped))

    def is_due(self, now: float) -> bool:
        """Whether a checkpoint in its place is due."""
        return self.chief_is_away and (self._saved_at is None or now - self._saved_at > STAND_IN_S)

    def saved(self, now: float) -> None:
        """One was made, by the chief with its last breath or by shard 0: the next is due by the clock."""
        self._saved_at = now

    def chief_is_there(self) -> None:
        """The next time that it goes, one is due at once."""
        self._saved_at = None
