"""Ctrl-C and SIGTERM during a run: the first requests a clean end, the second ends the process at once.

Installed by a session or a ps task on the main thread, and removed when it ends.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_installed: weakref.WeakSet[Signals] = weakref.WeakSet()
_watches_forks = False
_HANDLED = (signal.SIGINT, signal.SIGTERM)
_masks = threading.local()


def _hold_during_fork() -> None:
    """A signal that comes while a thread forks waits until the child has its own handlers: else it would be lost there."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)


def _release_after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _restore_in_fork() -> None:
    """A fork of a task is not the task: signals do to it what they did before."""
    for signals in list(_installed):
        with suppress(ValueError):  # forked from another thread, which may not set handlers
            signals.remove()
    _release_after_fork()


class Signals:
    """Records whether a signal has asked to stop, and its `name`; `say` then prints `what` will happen."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say, self._what = say, what
        self._before: dict[signal.Signals, Any] = {}
        self.asked = False
        self.name = ""

    def install(self) -> None:
        """Handles SIGINT and SIGTERM from now on; does nothing on other threads than the main one."""
        global _watches_forks
        if threading.current_thread() is threading.main_thread():
            if not _watches_forks:
                _watches_forks = True
                os.register_at_fork(
                    before=_hold_during_fork, after_in_parent=_release_after_fork, after_in_child=_restore_in_fork
                )
            _installed.add(self)
            for name in _HANDLED:
                self._before[name] = signal.signal(name, self._handle)

    def remove(self) -> None:
        """Restores the earlier handlers."""
        _installed.discard(self)
        for name, handler in self._before.items():
            signal.signal(name, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked, self.name = True, signal.Signals(number).name
        self._say(f"{self.name}: {self._what}; a second signal ends at once")
