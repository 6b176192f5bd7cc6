"""How many workers a run should have: `torchquorum scale` asks ps task 0 for a number, and the launcher reads it from there.

Imports no torch. What always holds: ps task 0 keeps the number, so that every launcher reads the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import torchquorum.wire.messages as m
from torchquorum.cluster.secret import Access
from torchquorum.launcher.watch import RunWatcher, ask_ps, connect_ps


def ask_to_scale(address: str, workers: int, access: Access, timeout_s: float) -> m.Scaled:
    """Asks for this number of workers; see `ask_ps` for what it raises, RefusedError if the run cannot have that many."""
    with closing(connect_ps(address, access)) as channel:
        # Sent once: a lost request does no harm, but a repeated one counts as a second request.
        return ask_ps(channel, address, m.Scale(workers), m.Scaled, timeout_s, repeat=False)


class RequestedWorkers:
    """The launcher's view of the requests: how many workers were last asked for.

    Args:
        where: Returns where ps task 0 listens now, or None.
        access: Returns the cluster's secret, if it has one.
    """

    def __init__(self, where: Callable[[], str | None], access: Callable[[], Access]) -> None:
        self._watcher = RunWatcher(where, access=access)
        self._seen = 0

    def news(self) -> int | None:
        """Returns how many workers are wanted if there was a request since the last call; never waits."""
        if not self._watcher.poll():
            return None
        status = self._watcher.status
        number = int(status.get("asked") or 0)
        if number == self._seen or status.get("stopped"):
            return None
        self._seen = number
        return status.get("wanted") if number else None

    def close(self) -> None:
        """Closes the connection."""
        self._watcher.close()
