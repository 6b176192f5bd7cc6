"""Makes a Python process and its children late now and then, wherever a busy machine could: for `make flake DISTURB=1`.

In front on PYTHONPATH, Python imports it by itself at the start of every process. Delays come before what a process does
first, before a thread begins, around what is done to files, after a wait and around messages: of those that a full machine
makes, the rare ones, often.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_random, _sleep = random.Random(), time.sleep  # programs may set the common one's seed


def late(chance: float, most_s: float) -> None:
    """Sleeps, or does not."""
    if _random.random() < chance:
        _sleep(_random.random() * most_s)


def disturb(owner: Any, name: str, *, before: tuple[float, float] | None, after: tuple[float, float] | None) -> None:
    """Makes a function late: the chance of it, and by how much at most, before and after its work."""
    original: Callable[..., Any] = getattr(owner, name)

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        if before:
            late(*before)
        result = original(*args, **kwargs)
        if after:
            late(*after)
        return result

    setattr(owner, name, disturbed)


class _Finder(importlib.abc.MetaPathFinder):
    """Disturbs the streams of messages when they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the module as if this were not there, and waits for its end."""
        if fullname != "torchquorum.wire.stream":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_disturb(module: ModuleType) -> None:
                load(module)
                disturb(module.StreamReader, "read", before=(0.005, 0.05), after=None)
                for name in ("send", "flush"):
                    disturb(module.StreamWriter, name, before=(0.005, 0.05), after=None)

            spec.loader.exec_module = load_and_disturb  # type: ignore[method-assign]
        return spec


late(0.5, 1.0)
disturb(threading.Thread, "_bootstrap_inner", before=(0.3, 0.5), after=None)
disturb(threading.Event, "wait", before=None, after=(0.05, 0.1))
disturb(threading.Condition, "wait", before=None, after=(0.02, 0.05))
disturb(os, "fsync", before=(0.3, 0.2), after=None)
for _name in ("replace", "rename", "unlink"):
    disturb(os, _name, before=(0.03, 0.1), after=(0.03, 0.1))
sys.meta_path.insert(0, _Finder())
