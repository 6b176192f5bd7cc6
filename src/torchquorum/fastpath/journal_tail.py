"""Where the journal of a durable run ends, as the ps and the workers share it: a part of the page (`torchquorum.fastpath.page`).

While the page is open the ps has lent the journal's file to the workers, and the one that makes an update appends its record. What always
holds: `end` is changed under the page's lock, with the version that the record makes; what stands behind it in the file is of an update
that is being made, or of one that never counted.
"""

from __future__ import annotations

import ctypes
import os

from torchquorum.memory.lock import LOCK_BYTES, SharedLock


class JournalWords(ctypes.Structure):
    """The words of the journal.

    Attributes:
        number: Which of the run's files it is; 0 if the run is not durable.
        pid: The process of the ps, which has it open.
        fd: The ps's descriptor of it.
        end: Where it ends, as far as it counts.
        waits: 1 if updates have to be on disk before a worker is told of them.
        on_disk: The version up to which updates are known to be on disk.
    """

    _fields_ = (
        ("number", ctypes.c_int64),
        ("pid", ctypes.c_int64),
        ("fd", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("waits", ctypes.c_int64),
        ("on_disk", ctypes.c_int64),
    )
    number: int
    pid: int
    fd: int
    end: int
    waits: int
    on_disk: int


class JournalTail:
    """The words, and the lock of the worker that waits for the disk while others wait for it."""

    def __init__(self, memory: memoryview, *, create: bool) -> None:
        self.words = JournalWords.from_buffer(memory[LOCK_BYTES:])
        self.disk_lock = SharedLock(ctypes.addressof(self.words) - LOCK_BYTES, create=create)
        if create:
            self.words.pid = os.getpid()

    @staticmethod
    def size_bytes() -> int:
        """Returns how much memory it needs."""
        return LOCK_BYTES + ctypes.sizeof(JournalWords)

    def lend(self, number: int, fd: int, end: int, *, waits: bool) -> None:
        """The ps lends a file of its own, open at `fd`; under the page's lock."""
        words = self.words
        words.fd, words.end, words.waits, words.number = fd, end, int(waits), number
