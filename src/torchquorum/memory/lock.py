"""A lock and a signal between processes that share memory, from the C library: a robust mutex, and futexes.

Used by `torchquorum.fastpath.page`. What always holds: no wait is longer than `timeout_s`; a lock whose holder died goes to the
next process that asks. Not every system has them: see `supported`.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys

from torchquorum.clock import SYSTEM

LOCK_BYTES = 64
SIGNAL_BYTES = 16
EVERY_WAITER = 1 << 30
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
# For calls that never wait: these keep the interpreter's lock.
_quick = ctypes.PyDLL(None) if _libc is not None else None


def supported() -> bool:
    """Whether processes of this system can share locks."""
    return _libc is not None


def _parts(seconds: float) -> _Time:
    whole = int(seconds)
    return _Time(whole, int((seconds - whole) * 1e9))


class SharedLock:
    """A mutex at an address in shared memory. A `with` block gets True, or False if the lock was not free in `timeout_s`."""

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
        self._held = self._acquire()
        return self._held

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._unlock(self._mutex)

    def _acquire(self) -> bool:
        result = self._trylock(self._mutex)
        if result == errno.EBUSY:
            until = _parts(SYSTEM.wall() + self.timeout_s)  # the kernel compares this with the machine's own clock
            result = self._timedlock(self._mutex, ctypes.byref(until))
        if result == errno.EOWNERDEAD:
            self._consistent(self._mutex)
            return True
        return result == 0


class _SignalWords(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int64), ("waiters", ctypes.c_int64))
    number: int
    waiters: int


class Signal:
    """A number in shared memory that processes wait on until it changes.

    Waiters count themselves under the lock that protects the memory, and the number changes under it. `wait` and `wake` are
    called without it. A waiter that dies is never subtracted; the cost is one extra system call per `wake`.
    """

    def __init__(self, address: int) -> None:
        self._words = _SignalWords.from_address(address)
        self._address = ctypes.c_void_p(address)

    @property
    def waiters(self) -> int:
        """Returns how many processes wait; may be read without the lock."""
        return self._words.waiters

    def begin_wait(self) -> int:
        """Counts a process that is going to wait, and returns the number that it has seen; under the lock."""
        self._words.waiters += 1
        return self._words.number

    def end_wait(self) -> None:
        """Counts a process that waits no more; under the lock."""
        self._words.waiters -= 1

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleeps until the number is not `seen` any more, until woken, or until the time is up."""
        _futex(self._address, _FUTEX_WAIT, seen, ctypes.byref(_parts(timeout_s)))

    def announce(self) -> None:
        """Changes the number, under the lock. Call `wake` once the lock is free: a woken process may take the waker's core."""
        self._words.number = (self._words.number + 1) & 0x7FFFFFFF

    def wake(self, count: int = EVERY_WAITER) -> None:
        """Wakes up to `count` waiters, the longest waiting first."""
        if self._words.waiters > 0:
            _futex(self._address, _FUTEX_WAKE, count, None)


def _futex(address: ctypes.c_void_p, operation: int, value: int, timeout: object) -> None:
    """Calls the kernel about the lower 32 bits of the word at an address."""
    assert _libc is not None
    call, word = _FUTEX_CALL[platform.machine()], ctypes.c_uint32(value & 0xFFFFFFFF)
    nothing = ctypes.c_void_p(0)
    _libc.syscall(
        ctypes.c_long(call), address, ctypes.c_int(operation), word, timeout or nothing, nothing, ctypes.c_int(0)
    )
