"""CPU time of a cluster, read in /proc: it says what a batch costs, and a busy machine hardly changes it.

Imported by every loop that is measured, TensorFlow's too, so it imports nothing but the standard library. A family is the
process that started the tasks, and all that it started.
"""

import os
import time
from pathlib import Path


def family_cpu_seconds(head: int | None = None) -> float:
    """Returns the CPU time, user and system, that a process and its children have used; the caller's parent by default."""
    head = os.getppid() if head is None else head
    used = 0
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                fields = (place / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            if int(place.name) == head or int(fields[1]) == head:
                used += int(fields[11]) + int(fields[12])
    return used / os.sysconf("SC_CLK_TCK")


class Window:
    """The time that is measured: from its making to `line`."""

    def __init__(self) -> None:
        self._cpu, self._wall = family_cpu_seconds(), time.perf_counter()

    @property
    def seconds(self) -> float:
        """Returns how long it has lasted."""
        return time.perf_counter() - self._wall

    def line(self, batches: float) -> str:
        """Returns what the harness reads: batches per second, and CPU seconds of the family per second."""
        seconds = self.seconds
        return f"rate {batches / seconds:.3f} cpu {(family_cpu_seconds() - self._cpu) / seconds:.4f}\n"
