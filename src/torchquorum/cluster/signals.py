"""Ctrl-C and SIGTERM during a run: the first requests a clean end, the second ends the process at once.

Installed by a session or a ps task on the main thread, and removed when it ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Signals:
    """Records whether a signal has asked to stop, and its `name`; `say` then prints `what` will happen."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say, self._what = say, what
        self._before: dict[signal.Signals, Any] = {}
        self.asked = False
        self.name = ""

    def install(self) -> None:
        """Handles SIGINT and SIGTERM from now on; does nothing on other threads than the main one."""
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                self._before[name] = signal.signal(name, self._handle)

    def remove(self) -> None:
        """Restores the earlier handlers."""
        for name, handler in self._before.items():
            signal.signal(name, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked, self.name = True, signal.Signals(number).name
        self._say(f"{self.name}: {self._what}; a second signal ends at once")
