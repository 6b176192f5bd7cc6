"""Ctrl-C and SIGTERM for a process that looks after others: they are noted, and asked for where it is safe.

Python raises KeyboardInterrupt wherever its main thread is, and swallows it in a finalizer and in what it calls around a fork. Used
by launchers, which fork or wait most of the time. What always holds: a signal that came while they are noted is not lost.
"""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any


class Interrupts:
    """Within, SIGINT and SIGTERM are noted and do nothing else; elsewhere than on the main thread nothing changes.

    Who enters it again is where he was before; the first end is the end.

    Attributes:
        came: The signals that came, in order.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> Interrupts:
        if not self._before and threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(name) not in (signal.SIG_IGN, None):  # ignored, as nohup has it: so it stays
                    self._before.append((name, signal.signal(name, lambda number, _: self.came.append(number))))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:  # SIGINT last: as soon as it has its own handler again, it may raise
            signal.signal(*self._before.pop())
