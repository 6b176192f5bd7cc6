"""A temporary folder, for a command or for a file before it is uploaded to an object store.

What always holds: it is removed at the end; if its process was killed, the next process removes it; the folder of a running
process is never removed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "torchquorum-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Creates the folder, and removes those of killed processes."""
    home = Path(tempfile.gettempdir())
    clear_left_behind(home)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{_space()}-{os.getpid()}-", dir=home) as folder:
        yield Path(folder)


def clear_left_behind(home: Path) -> list[Path]:
    """Removes the folders of this user's dead processes, as far as their pids are visible here."""
    named = re.compile(rf"{PREFIX}{_space()}-([1-9][0-9]{{0,9}})-\w+")
    removed: list[Path] = []
    for path in home.glob(f"{PREFIX}*"):
        match = named.fullmatch(path.name)
        if match and not is_alive(int(match[1])) and path.lstat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def is_alive(process: int) -> bool:
    """Whether a process of this host, and of this pid namespace, runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        pass
    return True


def _space() -> str:
    """Returns an id of the scope of a pid: its pid namespace."""
    try:
        return format(os.stat("/proc/self/ns/pid").st_ino, "x")
    except OSError:
        return "0"
