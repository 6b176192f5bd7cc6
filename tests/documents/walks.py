"""Which modules of torchquorum are entered, in which order, while something happens: for the walks of docs/ARCHITECTURE.md."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torchquorum
from tests.documents.markdown import ROOT, tables

PAGE = ROOT / "docs" / "ARCHITECTURE.md"
PACKAGE = str(Path(torchquorum.__file__).parent) + "/"
_MODULE = re.compile(r"`([\w/]+\.py)`")


class Recorder:
    """The modules whose functions are called, on all threads that begin inside the block, while `on` is set."""

    def __init__(self) -> None:
        self.on = False
        self.entered: list[str] = []

    def _call(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self.on or event != "call":
            return
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            self.entered.append(path[len(PACKAGE) :])

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Watches the threads that begin inside this block."""
        before = sys.getprofile()
        threading.setprofile(self._call)
        try:
            yield self
        finally:
            self.on = False
            threading.setprofile(before)


def rows_of(heading: str) -> list[list[str]]:
    """Returns the modules of each row of a walk, by their paths in the package."""
    rows, folder = list[list[str]](), ""
    for row in tables(PAGE, heading)[0][1:]:
        named = list[str]()
        for name in _MODULE.findall(row[0]):
            folder = name.rpartition("/")[0] if "/" in name else folder
            named.append(name if "/" in name else f"{folder}/{name}")
        rows.append(named)
    return rows


def faults_of(rows: Sequence[Sequence[str]], entered: Sequence[str], elsewhere: Sequence[str] = ()) -> list[str]:
    """Returns what of a walk does not agree with what was entered: each row's modules are, after the first one of the row before.

    Args:
        rows: The modules of the walk.
        entered: The modules that were entered, in order.
        elsewhere: Modules of other processes.
    """
    at, faults = 0, list[str]()
    for row in rows:
        here = [module for module in row if module not in elsewhere]
        later = entered[at:]
        missing = [module for module in here if module not in later]
        faults += [f"{module}: not entered{' any more at its place' * (module in entered)}" for module in missing]
        if here and not missing:
            at += later.index(here[0])
    return faults
