"""A lock and a way to wait between processes that share memory, from the C library: a robust mutex, and futexes.

Used by `torchquorum.transport.board` alone. What always holds: no wait is longer than it was asked to be; a lock whose
holder died is given to the next who asks. Not everywhere: `supported` says whether this system has what is needed.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import time

LOCK_BYTES = 64
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_PROCESS_SHARED, _ROBUST = 1, 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _library() -> ctypes.CDLL | None:
    if sys.platform != "linux" or platform.machine() not in _FUTEX_CALL or sys.byteorder != "little":
        return None  # pragma: no cover (other systems)
    library = ctypes.CDLL(None)
    needed = ("pthread_mutex_timedlock", "pthread_mutex_consistent", "pthread_mutexattr_setrobust", "syscall")
    if not all(hasattr(library, name) for name in needed):
        return None  # pragma: no cover (a C library without robust mutexes)
    library.syscall.restype = ctypes.c_long
    return library


_libc = _library()
_quick = (
    ctypes.PyDLL(None) if _libc is not None else None
)  # for calls that never wait: other threads need not run meanwhile


def supported() -> bool:
    """Whether processes of this system can share locks."""
    return _libc is not None


def _parts(seconds: float) -> _Time:
    whole = int(seconds)
    return _Time(whole, int((seconds - whole) * 1e9))


class SharedLock:
    """A mutex at an address in shared memory; as a block, it is held, or the block gets False after `timeout_s`."""

    def __init__(self, address: int, *, create: bool) -> None:
        assert _libc is not None and _quick is not None, "asked for a shared lock where there is none"
        self._mutex, self.timeout_s, self._held = ctypes.c_void_p(address), 1.0, False
        self._trylock, self._unlock = _quick.pthread_mutex_trylock, _quick.pthread_mutex_unlock
        self._timedlock, self._consistent = _libc.pthread_mutex_timedlock, _libc.pthread_mutex_consistent
        if create:
            attributes = ctypes.create_string_buffer(64)
            _libc.pthread_mutexattr_init(attributes)
            _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
            _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
            _libc.pthread_mutex_init(self._mutex, attributes)
            _libc.pthread_mutexattr_destroy(attributes)

    def __enter__(self) -> bool:
        self._held = self.acquire(self.timeout_s)
        return self._held

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._unlock(self._mutex)

    def acquire(self, timeout_s: float) -> bool:
        """Takes the lock; False if it could not be had in time, or never will be."""
        result = self._trylock(self._mutex)
        if result == errno.EBUSY:
            until = _parts(time.time() + timeout_s)
            result = self._timedlock(self._mutex, ctypes.byref(until))
        if result == errno.EOWNERDEAD:
            self._consistent(self._mutex)
            return True
        return result == 0

    def release(self) -> None:
        """Gives the lock back; only by who holds it."""
        self._unlock(self._mutex)


def wait_while(address: int, value: int, timeout_s: float) -> None:
    """Sleeps while the 32-bit word at `address` is `value`, until woken or until the time is up."""
    assert _libc is not None
    length = _parts(timeout_s)
    _libc.syscall(
        ctypes.c_long(_FUTEX_CALL[platform.machine()]),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAIT),
        ctypes.c_uint32(value & 0xFFFFFFFF),
        ctypes.byref(length),
        ctypes.c_void_p(0),
        ctypes.c_int(0),
    )


def wake(address: int, count: int) -> None:
    """Wakes up to `count` of those who wait at an address."""
    assert _libc is not None
    _libc.syscall(
        ctypes.c_long(_FUTEX_CALL[platform.machine()]),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAKE),
        ctypes.c_int(count),
        ctypes.c_void_p(0),
        ctypes.c_void_p(0),
        ctypes.c_int(0),
    )
