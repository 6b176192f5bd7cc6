"""Which run uses a folder: the ps task that writes the ledger locks the folder itself, until its process ends.

Held by the ledger's writer; checked by a chief before it begins. What always holds: no file is left behind; the lock of a killed
process is gone at once; children do not inherit it; without such locks in the file system, no folder counts as in use.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover (other systems)
    fcntl = None

_held: dict[tuple[int, int], list[int]] = {}  # this process's descriptors that lock a folder, by device and inode


def _forget_in_child() -> None:
    for fds in _held.values():
        for fd in fds:
            with suppress(OSError):
                os.close(fd)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class Hold:
    """Marks a folder as used by this process, unless another process has; one process may hold a folder several times."""

    def __init__(self, folder: Path) -> None:
        self._key, self._fd = _try_lock(folder)
        if self._fd is not None:
            _held.setdefault(self._key, []).append(self._fd)

    def release(self) -> None:
        """Releases the folder."""
        fds = _held.get(self._key, [])
        if self._fd in fds:  # false in a forked child, which does not hold it
            fds.remove(self._fd)
            os.close(self._fd)
            if not fds:
                del _held[self._key]
        self._fd = None

    @property
    def held(self) -> bool:
        """Whether this object holds the folder."""
        return self._fd is not None

    def __del__(self) -> None:
        self.release()


def user_of(folder: Path) -> str | None:
    """Returns which other process holds a folder, such as 'process 123'; None if none does."""
    key, fd = _try_lock(folder)
    if fd is not None:
        os.close(fd)
        return None
    if key == (0, 0) or key in _held:
        return None
    return _holder(key) or "a process that is not visible on this host"


def _try_lock(folder: Path) -> tuple[tuple[int, int], int | None]:
    """Returns the folder's identity and a locked descriptor, or None if it is taken; (0, 0) if it cannot be locked at all."""
    if fcntl is None:  # pragma: no cover (other systems)
        return (0, 0), None
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return (0, 0), None
    about = os.fstat(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return (about.st_dev, about.st_ino), None
    except OSError:
        os.close(fd)
        return (0, 0), None
    return (about.st_dev, about.st_ino), fd


def _holder(key: tuple[int, int]) -> str | None:
    """Finds the process in the kernel's list of locks."""
    place = f"{os.major(key[0]):02x}:{os.minor(key[0]):02x}:{key[1]}"
    with suppress(OSError):
        found = re.search(rf"FLOCK\s+ADVISORY\s+WRITE\s+(\d+)\s+{place}\s", Path("/proc/locks").read_text())
        return f"process {found[1]}" if found is not None else None
    return None
