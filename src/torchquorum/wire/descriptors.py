"""File descriptors when few are left: how many connections fit, and one descriptor in reserve.

Used by what listens. What always holds: giving the reserve up and taking it again needs no other descriptor.
"""

from __future__ import annotations

import os
from contextlib import suppress

KEPT_FILES = 256


def most_connections() -> int:
    """Returns how many connections fit beside the descriptors that a task needs; first asks the system for as many as it gives."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard or hard == resource.RLIM_INFINITY:
            wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
            if soft != resource.RLIM_INFINITY and soft < wanted:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
    except (ImportError, OSError, ValueError):
        soft = 1024
    return max(64, (soft if soft > 0 else 65536) - KEPT_FILES)


class Reserve:
    """One descriptor that is kept for the moment when no other is left."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self.take()

    @property
    def held(self) -> bool:
        """Whether it is there."""
        return self._fd is not None

    def take(self) -> None:
        """Takes one, if there is none in reserve and the system has one."""
        if self._fd is None:
            with suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def give(self) -> None:
        """Gives it up, for the next thing that needs one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
