"""Whether what a run writes is still there: somebody may remove its folder, its ledger or its journals while it goes on.

Owned by the run of each ps task, asked at every tick. What always holds: on shard 0 a removal is told once, so that a checkpoint is
made at once and all shards begin their journals again with it; a shard other than 0 whose journal stays removed ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable

from torchquorum.formats.journal import JournalError
from torchquorum.server.shard import Shard

REMOVED_S = 30.0


class FolderWatch:
    """Looks after the files of one run on one ps task.

    Args:
        shard: Whose journal it is.
        announce: Prints a line for people.
    """

    def __init__(self, shard: Shard, announce: Callable[[str], None]) -> None:
        self._shard, self._announce = shard, announce
        self._losses = 0
        self._removed_at: float | None = None

    @property
    def _journal_is_gone(self) -> bool:
        return self._shard.journal is not None and self._shard.journal.removed

    def has_to_save(self, losses: int, *, saving: bool) -> bool:
        """On shard 0: whether something was removed since the last look, so that a checkpoint is due.

        Args:
            losses: How often the ledger was found removed.
            saving: Whether one is in the making, with which journals begin again.
        """
        lost, self._losses = losses > self._losses, losses
        if not self._journal_is_gone or saving:
            return lost
        assert self._shard.journal is not None
        self._announce(
            f"the journal {self._shard.journal.path} was removed while the run goes on; it is begun again, and a checkpoint is made "
            "at once. Until that is saved, a ps task that dies takes its updates with it"
        )
        return True

    def check(self, now: float) -> None:
        """On the other shards: whether the journal is there, or begun again by a checkpoint of shard 0.

        Raises:
            JournalError: It was removed, and nothing has come of it.
        """
        if not self._journal_is_gone:
            self._removed_at = None
            return
        self._removed_at = now if self._removed_at is None else self._removed_at
        if now - self._removed_at > REMOVED_S:
            assert self._shard.journal is not None
            raise JournalError(
                f"the journal {self._shard.journal.path} was removed while the run goes on, so its updates would be lost with this "
                "task. Leave the files of a durable run where they are, and start the tasks again"
            )
