"""The default folder of a run, such as runs/mnist-20261116-103402.

What always holds: two runs never get the same folder, even if they start in the same second.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path


def new_run_folder(kind: str) -> str:
    """Creates a folder for a run and returns its name; if it cannot be created, the first write there reports why."""
    for name in run_folder_names(kind):
        try:
            Path(name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            pass
        return name
    raise AssertionError("unreachable: the names never end")


def run_folder_names(kind: str) -> Iterator[str]:
    """Yields names for a run that starts now, the preferred one first."""
    name = f"runs/{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    yield name
    for number in itertools.count(2):
        yield f"{name}-{number}"
