"""Records Ctrl-C and SIGTERM instead of raising, so that a launcher can handle them where it is safe.

Python raises KeyboardInterrupt wherever the main thread is, and loses it inside finalizers and fork handlers. Used by launchers,
which fork or wait most of the time. What always holds: a signal that arrives inside the context is not lost.
"""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any


class Interrupts:
    """A context in which SIGINT and SIGTERM are only recorded; on other threads than the main one it does nothing.

    Entering it again changes nothing, and the first exit restores the handlers.

    Attributes:
        came: The signals that arrived, in order.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> Interrupts:
        if not self._before and threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(name) not in (signal.SIG_IGN, None):  # ignored, as under nohup: leave it so
                    self._before.append((name, signal.signal(name, lambda number, _: self.came.append(number))))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:  # SIGINT last: once its handler is back, it may raise
            signal.signal(*self._before.pop())
