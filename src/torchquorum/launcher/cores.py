"""Which cores a worker gets when a launcher divides a machine among its workers.

Used by `torchquorum.launcher.local`. A ps wakes often and for short; where workers move about, it waits behind one that computes
while another core is idle. What always holds: workers get equal shares or none is given one; the ps tasks go where there is
room.
"""

from __future__ import annotations

import os
from contextlib import suppress


def share_of(worker: int, workers: int) -> set[int] | None:
    """Returns the cores of a worker; None where they cannot be divided evenly, or not at all."""
    if not hasattr(os, "sched_getaffinity") or workers < 2:
        return None
    cores = sorted(os.sched_getaffinity(0))
    each, left = divmod(len(cores), workers)
    return set(cores[worker * each : (worker + 1) * each]) if each and not left else None


def settle(pid: int, cores: set[int] | None) -> None:
    """Keeps a process, and what it will start, on some cores; one that is gone, or may not be kept, is let be."""
    if cores is not None:
        with suppress(OSError):
            os.sched_setaffinity(pid, cores)
