"""A folder for files that nobody keeps, under the system's temporary folder: of a command, or of a part on its way to an object store.

What always holds: it is gone when it is done with; if its process was killed, the next one removes it, and never that of a
process that still runs.
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
    """Makes the folder, and removes those of processes that were killed."""
    home = Path(tempfile.gettempdir())
    clear_left_behind(home)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{_space()}-{os.getpid()}-", dir=home) as folder:
        yield Path(folder)


def clear_left_behind(home: Path) -> list[Path]:
    """Removes the folders of this user's processes that are dead, as far as their numbers can be looked up here."""
    named = re.compile(rf"{PREFIX}{_space()}-([1-9][0-9]{{0,9}})-\w+")
    removed: list[Path] = []
    for path in home.glob(f"{PREFIX}*"):
        match = named.fullmatch(path.name)
        if match and not _lives(int(match[1])) and path.lstat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True


def _space() -> str:
    """Returns an id of what a process's number is valid in: its namespace."""
    try:
        return format(os.stat("/proc/self/ns/pid").st_ino, "x")
    except OSError:
        return "0"
