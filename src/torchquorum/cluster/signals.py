"""Ctrl-C and SIGTERM during a run: the first requests a clean end, the second ends the process at once.

Installed by a session or a ps task on the main thread, and removed when it ends. What always holds: a session whose program does not come
to look, because it waits or computes somewhere else, is interrupted there, soon after the first signal.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from torchquorum.clock import SYSTEM, Clock

UNSEEN_S = 5.0
WATCH_EVERY_S = 0.25
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
    """Records whether a signal has asked to stop, and its `name`; `say` then prints `what` will happen.

    Args:
        say: Prints a line.
        what: What will happen.
        overdue: Asked after a signal, on a thread of its own: returns what to raise in a main thread that has not looked at `asked` for
            `UNSEEN_S`, or None if that is to be waited for.
        clock: Tells the time.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        what: str,
        overdue: Callable[[], BaseException | None] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._say, self._what, self._overdue, self._clock = say, what, overdue, clock
        self._before: dict[signal.Signals, Any] = {}
        self._asked, self._seen_at = False, 0.0
        self._guard = threading.Lock()  # of `_before`: no signal is sent to a process that does not handle it any more
        self._raises: BaseException | None = None
        self.name = ""

    @property
    def asked(self) -> bool:
        """Whether a signal has come; who asks has seen it."""
        if self._asked:
            self._seen_at = self._clock.now()
        return self._asked

    def ask(self, name: str) -> None:
        """Asks to stop, as a signal of this name does."""
        self._asked, self._seen_at, self.name = True, self._clock.now(), name

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
        with self._guard:
            before, self._before = self._before, {}
        for name, handler in before.items():
            signal.signal(name, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        error, self._raises = self._raises, None
        if error is not None:
            raise error
        if self._asked:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)
        self._say(f"{self.name}: {self._what}; a second signal ends at once")
        if self._overdue is not None:
            # Not threading.Thread: the main thread may hold one of its locks just now.
            _thread.start_new_thread(self._watch, (number, self._overdue))

    def _watch(self, number: int, overdue: Callable[[], BaseException | None]) -> None:
        """Waits until the session is over; interrupts the main thread if that does not come to look."""
        while self._raises is None:
            self._clock.sleep(WATCH_EVERY_S)
            with self._guard:
                if not self._before:
                    return
                if self._clock.now() - self._seen_at > UNSEEN_S:
                    self._raises = overdue()
                if self._raises is not None:
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
