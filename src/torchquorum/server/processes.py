"""The processes of workers on this host: which are known by their greeting, and which of them have ended.

`note_process` is the service's; `ProcessWatch` belongs to the ps thread. What always holds: of each worker only the last few
incarnations are watched.
"""

from __future__ import annotations

import os
import select

LIVES_WATCHED = 8

Pids = dict[tuple[int, int], int]


def note_process(pids: Pids, worker: int, incarnation: int, pid: int) -> None:
    """Adds a worker's process to those known by worker and incarnation; the worker's oldest are dropped."""
    lives = [key for key in pids if key[0] == worker]
    for old in lives[: 1 - LIVES_WATCHED]:
        del pids[old]
    pids[worker, incarnation] = pid


class ProcessWatch:
    """Watches processes, so that a death is known at once.

    Args:
        pids: What to watch: process ids by worker and incarnation. The owner adds and removes.
    """

    def __init__(self, pids: Pids) -> None:
        self._pids = pids
        self._watched: dict[int, tuple[int, int]] = {}
        self._poller = select.poll()

    @property
    def watched(self) -> set[tuple[int, int]]:
        """Returns the workers and incarnations whose processes are watched."""
        return set(self._watched.values())

    def ended(self) -> list[tuple[int, int]]:
        """Returns the workers and incarnations whose processes have ended since the last call; takes up new ones."""
        found = self._follow_pids()
        for fd, _ in self._poller.poll(0):
            found.append(self._watched[fd])
            self._drop(fd)
        return found

    def _follow_pids(self) -> list[tuple[int, int]]:
        for fd in [fd for fd, key in self._watched.items() if key not in self._pids]:
            self._drop(fd)
        gone, watched = [], self.watched
        for key, pid in list(self._pids.items()):
            if key in watched:
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                gone.append(key)
                continue
            except OSError:  # no file descriptor is left: its beats say whether it lives
                continue
            self._watched[fd] = key
            self._poller.register(fd, select.POLLIN)
        return gone

    def _drop(self, fd: int) -> None:
        self._poller.unregister(fd)
        del self._watched[fd]
        os.close(fd)

    def close(self) -> None:
        """Closes the file descriptors."""
        for fd in list(self._watched):
            self._drop(fd)
