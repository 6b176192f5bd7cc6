"""What Ray prints by itself into the driver's output: kept where it helps, as one line of the launcher's own.

`ray_cluster` puts it in place for the time of a run on a Ray that was joined for it. Ray has no setting for these lines, so its
function is exchanged; where a version of Ray has another, its lines appear as Ray writes them. What always holds: `restore`
leaves Ray as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

PRINTER = "print_to_stdstream"
LONGEST = 300


def shorten(message: str) -> str | None:
    """Returns what a message of Ray's says in one line, or None where the launcher says it itself or it is of no use."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    lost = re.search(r"node with node id.*\baddress: (\S+).*marked dead", first)
    if lost is not None:
        return f"Ray has lost the machine {lost[1]}"
    if not first or first.startswith(("Raylet is terminated", "[state-dump]")):
        return None  # twenty lines of the raylet's state follow, and another message says which machine it was
    if re.match(r"A worker died or was killed|.*\bActor .*TaskHost|\d+ Workers? .*killed", first):
        return None
    return f"Ray: {first[:LONGEST]}"


class Quiet:
    """Ray's lines, taken from its output.

    Args:
        say: Takes a line for people, on a thread of Ray's.
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
        """Takes what Ray wants printed."""
        for message in data.get("lines", ()):
            line = shorten(str(message))
            if line is not None and line not in self._said:
                self._said.add(line)
                self._say(line)

    def restore(self) -> None:
        """Leaves Ray as it was."""
        if self._module is not None:
            setattr(self._module, PRINTER, self._printer)
            self._module = None
