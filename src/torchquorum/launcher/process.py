"""The process of one task, as every launcher sees it: its interface, its exit code in words, and its death with the launcher.

Implemented by subprocess.Popen, `fork.Forked` and `on_ray.RemoteTask`. Imports nothing of torchquorum.
"""

from __future__ import annotations

import ctypes
import signal
from typing import IO, Protocol

_PR_SET_PDEATHSIG = 1


class Process(Protocol):
    """The methods of subprocess.Popen that a launcher needs."""

    @property
    def pid(self) -> int:
        """Returns the process id."""
        ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Returns the pipe with its output, if it has one."""
        ...

    def poll(self) -> int | None:
        """Returns its exit code, negative for a signal, or None while it runs."""
        ...

    def send_signal(self, sig: int) -> None:
        """Sends it a signal, unless it has ended."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...


def describe_exit(code: int) -> str:
    """Returns in words how a process with this exit code has ended."""
    if code == 130:
        return "was interrupted and has ended in good order (exit code 130)"
    if code == -signal.SIGINT:
        return "failed with an uncaught KeyboardInterrupt"
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def die_with_parent() -> None:
    """In the child: lets the kernel kill it when the launcher dies, so that kill -9 of the launcher leaves no process."""
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = getattr(libc, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
