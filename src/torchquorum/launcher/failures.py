"""Reads in the output of tasks why they fail: equal tracebacks are shown once, and the first failure is told at the end.

Used by every launcher; each task's lines come on a thread of their own. What always holds: a line of a task is passed on, except those of
a traceback that another task has shown already, for which one line stands; lines of one task keep their order.
"""

from __future__ import annotations

import itertools
import re
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path

from torchquorum.cluster import TaskId

BEGIN = "Traceback (most recent call last):"
ERROR = "torchquorum: error: "
MOST_LINES = 500  # of a traceback; what is longer is none
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<where>.+))?')
_RAISED = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: .*)?")
_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARIES = tuple(
    {_PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
)


@dataclass(frozen=True)
class Failure:
    """What a task's output says of its failure.

    Attributes:
        order: Failures of all tasks are numbered as they come.
        error: The exception, as Python writes it, or our own message.
        place: File, line and function in the program, as far as there is a traceback.
    """

    order: int
    error: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.error}" if self.place else self.error


class Failures:
    """The failures of a launcher's tasks, by their output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[TaskId, list[str]] = {}  # of a traceback that has not ended
        self._shown: dict[tuple[str, ...], TaskId] = {}
        self._numbers = itertools.count()
        self._last: dict[TaskId, Failure] = {}

    def of(self, task: TaskId) -> Failure | None:
        """Returns the last failure in the output of a task."""
        with self._lock:
            return self._last.get(task)

    def read(self, task: TaskId, line: str) -> list[str]:
        """Takes a line of a task, and returns the lines to show now."""
        with self._lock:
            held = self._held.get(task)
            if held is None and line == BEGIN:
                self._held[task] = [line]
                return []
            if held is None:
                return [self._own_error(task, line) if line.startswith(ERROR) else line]
            held.append(line)
            if line[:1].isspace() or not line:
                return self._held.pop(task) if len(held) > MOST_LINES else []
            return self._end(task, self._held.pop(task))

    def end(self, task: TaskId) -> list[str]:
        """The output of a task has ended: returns what was held back."""
        with self._lock:
            return self._held.pop(task, [])

    def _own_error(self, task: TaskId, line: str) -> str:
        self._last[task] = Failure(next(self._numbers), line.removeprefix(ERROR))
        before = self._shown.setdefault((line,), task)
        return line if before == task else f"{ERROR}the same as {before}"

    def _end(self, task: TaskId, lines: list[str]) -> list[str]:
        """A traceback is complete, if its last line is an exception."""
        raised = _RAISED.fullmatch(lines[-1])
        if raised is None:
            return lines
        self._last[task] = Failure(next(self._numbers), lines[-1], _place(lines))
        before = self._shown.setdefault((*lines[:-1], raised["kind"]), task)
        return lines if before == task else [f"{lines[-1]} (the traceback is the same as that of {before})"]


def _place(lines: list[str]) -> str:
    """Returns the innermost place that is in the program, not in a library."""
    frames = [found for line in lines if (found := _FRAME.fullmatch(line)) is not None]
    own = [frame for frame in frames if not frame["file"].startswith((*_LIBRARIES, "<"))]
    if not (own or frames):
        return ""
    frame = (own or frames)[-1]
    where = f", in {frame['where']}" if frame["where"] not in (None, "<module>") else ""
    return f"{Path(frame['file']).name}, line {frame['line']}{where}"
