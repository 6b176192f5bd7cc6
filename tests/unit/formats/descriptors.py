"""Finds open file descriptors of this process, to make them fail."""

from __future__ import annotations

import os
from pathlib import Path


def descriptor_of(path: Path) -> int:
    """Returns the descriptor under which this process has a file open."""
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}") == str(path.resolve()):
                return int(number)
        except OSError:  # the one that lists them
            continue
    raise AssertionError(f"{path} is not open")
