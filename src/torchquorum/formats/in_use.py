"""Which run uses a folder: the ps task that writes the ledger locks it, until its process ends.

Held by the ledger's writer; checked by a chief before it begins. There are two locks. One is on the folder itself, which other
hosts see on a shared file system. The other is the run's: a name in the kernel made from the folder's path, so a folder that
was removed and made again under a living run is still in use. What always holds: no file is left behind; the locks of a killed
process are gone at once; children do not inherit them; without such locks in the file system, no folder counts as in use.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover (other systems)
    fcntl = None

_held: dict[tuple[int, int], list[int]] = {}  # this process's descriptors that lock a folder, by device and inode
_names: dict[str, tuple[socket.socket, int]] = {}  # this process's names in the kernel, and how many hold each


def _forget_in_child() -> None:
    for fds in _held.values():
        for fd in fds:
            with suppress(OSError):
                os.close(fd)
    for listening, _ in _names.values():
        listening.close()
    _held.clear()
    _names.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class Hold:
    """Marks a folder as used by this process, unless another process has; one process may hold a folder several times."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._key = folder, (0, 0)
        self._fd: int | None = None
        self._pid = os.getpid()
        self._name: str | None = _take_name(folder)
        self._lock()

    def _lock(self) -> None:
        self._key, self._fd = _try_lock(self._folder)
        if self._fd is not None:
            _held.setdefault(self._key, []).append(self._fd)

    def renew(self) -> None:
        """Locks the folder that is there now: it may have been made since, or removed and made again."""
        try:
            about = os.stat(self._folder)
        except OSError:
            return
        if self._fd is None or (about.st_dev, about.st_ino) != self._key:
            self._unlock()
            self._lock()
        if self._name is None:
            self._name = _take_name(self._folder)

    def release(self) -> None:
        """Releases the folder."""
        self._unlock()
        if self._name is not None and self._pid == os.getpid():
            _give_name_back(self._name)
        self._name = None

    def _unlock(self) -> None:
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
        return _user_of_name(folder)
    if key == (0, 0) or key in _held:
        return _user_of_name(folder)
    return _holder(key) or "a process that is not visible on this host"


def _kernel_name(folder: Path) -> str:
    """Returns the name of a folder's path in the kernel, which is one per host, or per container with a network of its own."""
    path = os.path.realpath(folder)
    return "\0torchquorum-run-" + hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _take_name(folder: Path) -> str | None:
    """Takes the name of a folder's path; returns None if another process has it, or there are no such names."""
    if not sys.platform.startswith("linux"):  # pragma: no cover (other systems)
        return None
    name = _kernel_name(folder)
    if name in _names:
        listening, count = _names[name]
        _names[name] = listening, count + 1
        return name
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.bind(name)
        listening.listen(1)
    except OSError:
        listening.close()
        return None
    _names[name] = listening, 1
    return name


def _give_name_back(name: str) -> None:
    listening, count = _names.get(name, (None, 0))
    if listening is None:
        return
    if count > 1:
        _names[name] = listening, count - 1
        return
    del _names[name]
    listening.close()


def _user_of_name(folder: Path) -> str | None:
    """Returns which other process has the name of a folder's path."""
    if not sys.platform.startswith("linux"):  # pragma: no cover (other systems)
        return None
    name = _kernel_name(folder)
    if name in _names:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asking:
        asking.setblocking(False)
        try:
            asking.connect(name)
        except BlockingIOError:  # its queue is full: others are asking too
            return "a process on this host"
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {pid}" if pid > 0 else "a process on this host"


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
