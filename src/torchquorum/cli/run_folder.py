"""Where a command puts a run that was given no folder: runs/mnist-20261116-103402, of this run alone.

What always holds: two runs never get the same one, whenever and by whomever they are started.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path


def new_run_folder(kind: str) -> str:
    """Makes a folder for a run of a kind and returns its name; where none can be made, whoever writes there says why."""
    for name in run_folder_names(kind):
        try:
            Path(name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            pass
        return name
    raise AssertionError("there is always another number")


def run_folder_names(kind: str) -> Iterator[str]:
    """Yields names for a run that begins now, the best first."""
    name = f"runs/{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    yield name
    for number in itertools.count(2):
        yield f"{name}-{number}"
