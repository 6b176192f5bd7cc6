"""Which tasks of a launcher have called `tq.join()`: a program that never does so is no task, and several copies of it train alone.

The launcher owns a file in memory and hands it to its tasks; `tq.join()` writes the task's name there. What always holds: nothing but
that file is written to, whatever the program has done with its descriptors.
"""

from __future__ import annotations

import os
from contextlib import suppress

from torchquorum import env
from torchquorum.cluster.spec import TaskId

NAME = "torchquorum-joined"
LENGTH = 1 << 20


class JoinedTasks:
    """The launcher's end.

    Attributes:
        fd: What tasks inherit; `env.JOINED` tells them its number.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create(NAME)

    def has(self, task: TaskId) -> bool:
        """Whether a process of the task has joined."""
        return self.count(task) > 0 if self.fd >= 0 else True

    def count(self, task: TaskId) -> int:
        """Returns how many processes of the task have joined, one after another."""
        return os.pread(self.fd, LENGTH, 0).split(b"\n").count(str(task).encode()) if self.fd >= 0 else 0

    def close(self) -> None:
        """Releases the file; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def tell(task: TaskId) -> None:
    """Tells the launcher, if there is one, that this process is a task."""
    fd = env.joined()
    if fd is None:
        return
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{NAME}"):
            os.write(fd, f"{task}\n".encode())
