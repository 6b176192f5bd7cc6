"""File descriptors when few are left: one in reserve, a check that some are free, and a handle on those of another library.

Used by what listens. What always holds: none of these needs a new descriptor once it has been made.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

KEPT_FILES = 256
Address = tuple[Any, ...]


def check_files(count: int) -> None:
    """Raises OSError unless this process may open so many more descriptors: ZeroMQ ends a process that has none for its threads."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for fd in opened:
            os.close(fd)


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


class Handle:
    """A handle on connections of another library, which may be gone by now. Safe from any thread."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._file = os.dup(self._nothing)
        except OSError:
            os.close(self._nothing)
            raise
        self._lock = threading.Lock()

    def peer_of(self, fd: int) -> Address:
        """Returns address and port of the other end of a connection, or nothing."""
        peer = self._at(fd, lambda found: found.getpeername())
        return peer if isinstance(peer, tuple) else ()

    def hang_up(self, fd: int, peer: Address) -> None:
        """Ends a connection, if the descriptor is still that of the same one."""
        self._at(fd, lambda found: found.shutdown(socket.SHUT_RDWR) if found.getpeername() == peer else None)

    def _at(self, fd: int, do: Callable[[socket.socket], Any]) -> Any:
        """Does something with a connection; None if the system refuses."""
        with self._lock, suppress(OSError):
            os.dup2(fd, self._file, inheritable=False)
            try:
                found = socket.socket(fileno=self._file)
                try:
                    return do(found)
                finally:
                    found.detach()
            finally:
                os.dup2(self._nothing, self._file, inheritable=False)
        return None

    def close(self) -> None:
        """Closes its own descriptors."""
        os.close(self._file)
        os.close(self._nothing)
