"""Filters what Ray prints into the driver's output: useful messages become one line of the launcher, the rest is dropped.

`ray_cluster` installs it while it is connected. Ray has no setting for these lines, so its print function is replaced; with a
version of Ray that has no such function, its lines appear unchanged. What always holds: `restore` leaves Ray as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

PRINTER = "print_to_stdstream"
LONGEST = 300


def shorten(message: str) -> str | None:
    """Returns a message of Ray as one line, or None where it is useless or the launcher reports the same itself."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    lost = re.search(r"node with node id.*\baddress: (\S+).*marked dead", first)
    if lost is not None:
        return f"Ray has lost the machine {lost[1]}"
    if not first or first.startswith(("Raylet is terminated", "[state-dump]")):
        return None  # followed by twenty lines of the raylet's state; another message names the machine
    if re.match(r"A worker died or was killed|.*\bActor .*TaskHost|\d+ Workers? .*killed", first):
        return None
    return f"Ray: {first[:LONGEST]}"


class RayOutputFilter:
    """Replaces Ray's print function until `restore`.

    Args:
        say: Receives the lines to print, on a thread of Ray.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._module: Any = None
        try:
            from ray._private import worker
        except ImportError:
            return
        if hasattr(worker, PRINTER):
            self._module, self._printer = worker, getattr(worker, PRINTER)
            setattr(worker, PRINTER, self._take)

    def _take(self, data: Any, *_: Any, **__: Any) -> None:
        """Stands in for Ray's print function."""
        for message in data.get("lines", ()):
            line = shorten(str(message))
            if line is not None and line not in self._said:
                self._said.add(line)
                self._say(line)

    def restore(self) -> None:
        """Puts Ray's own function back."""
        if self._module is not None:
            setattr(self._module, PRINTER, self._printer)
            self._module = None
