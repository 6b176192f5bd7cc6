"""What a recorded worker says of itself when it joins: enough to run its process again, and what in it cannot be repeated.

Used by the attachment of a worker. What always holds: only variables of the environment that change what is computed are
recorded, never all of it, which may hold secrets.
"""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader

from torchquorum import env
from torchquorum.errors import ConfigError
from torchquorum.formats.storage import is_remote
from torchquorum.session import position
from torchquorum.version import __version__

_memory: Any = torch.utils.deterministic
MOST_FILES = 500
_HASH_SEED = "PYTHONHASHSEED"
_DETERMINISTIC = "deterministic"


class LifeBody(msgspec.Struct, kw_only=True):
    """A worker's process, as it stands in a record.

    Attributes:
        command: Its command line, from the interpreter on.
        folder: Its working directory.
        environment: The variables that change what it computes.
        files: The program's own source files, each with its checksum.
        versions: Of Python, torch, NumPy and torchquorum.
        cpu: The processor's model, and what of it torch uses.
        threads: How many threads an operation uses.
        joined: The random state when it called `tq.join()`.
        began: The random state, and the position in the data, when its session began.
        doubts: What may differ when it is run again.
    """

    command: list[str]
    folder: str
    environment: dict[str, str]
    files: dict[str, str]
    versions: dict[str, str]
    cpu: str
    threads: int
    joined: dict[str, Any]
    began: dict[str, Any]
    doubts: list[str] = []


def read_record(option: bool | None, folder: str | None) -> bool:
    """Returns whether the run is recorded; by default as the launcher asks.

    Raises:
        ConfigError: There is no folder for the record, or the process cannot be run again.
    """
    if not (env.record() if option is None else option):
        return False
    if folder is None:
        raise ConfigError("record=True: the record needs a folder; give the session a logdir too")
    if is_remote(folder):
        raise ConfigError(
            f"record=True: a record is appended to, which an object store cannot do; give a logdir on a file system, not {folder}"
        )
    if env.is_fork():
        raise ConfigError(
            "record=True: a function of tq.launch has no command by which it could be run again; write a script and use `torchquorum run`"
        )
    return True


def versions() -> dict[str, str]:
    """Returns the versions that have to be the same for a replay."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "torchquorum": __version__,
    }


def cpu_model() -> str:
    """Returns the processor's model, and which of its instructions torch uses."""
    name = platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def describe_life(
    joined: position.Captured | None, data: Mapping[str, position.Resumable], say: Callable[[str], None]
) -> bytes:
    """Returns what the record of a run has of this process; says what in it cannot be repeated."""
    doubts = find_doubts()
    for doubt in doubts:
        say(f"recording; a replay may differ: {doubt}")
    began = position.capture(data)
    if began.is_late:
        began.capture_late()
    body = LifeBody(
        command=[sys.executable, *sys.orig_argv[1:]],
        folder=os.getcwd(),
        environment=env.of_computing(),
        files=program_files(),
        versions=versions(),
        cpu=cpu_model(),
        threads=torch.get_num_threads(),
        joined=joined.encode() if joined is not None else {},
        began=began.encode(),
        doubts=doubts,
    )
    return msgspec.msgpack.encode(body)


def program_files() -> dict[str, str]:
    """Returns the source files of the program that are loaded, without those of installed packages, each with its checksum."""
    installed = {Path(entry).resolve() for entry in sys.path if "site-packages" in entry or "dist-packages" in entry}
    installed |= {Path(os.__file__).resolve().parent, Path(__file__).resolve().parent.parent}
    found: dict[str, str] = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py"):
            continue
        path = Path(name).resolve()
        if len(found) < MOST_FILES and not any(folder in path.parents for folder in installed):
            with suppress(OSError):
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def find_doubts() -> list[str]:
    """Returns what of this process cannot be repeated, as far as that can be seen when recording begins."""
    found = []
    if env.variables(_HASH_SEED).get(_HASH_SEED, "random") == "random":
        found.append(
            f"{_HASH_SEED} is not set, so sets of words have another order in every process; set it, or start the run with "
            "`torchquorum run --record`, which does"
        )
    for loader in (thing for thing in gc.get_objects() if type(thing) is DataLoader):
        if loader.num_workers > 1 and not getattr(loader, "in_order", True):
            found.append(
                "a DataLoader has in_order=False: its batches come in the order in which its processes finish them"
            )
    if torch.cuda.is_initialized():
        found.append("it computes on a GPU, where some operations add up in an order of their own")
    return list(dict.fromkeys(found))


class Determinism:
    """While a run is recorded torch uses algorithms that repeat, where it has them, and an operation that has none is named.

    Args:
        say: Prints a line for people.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: tuple[bool, bool, bool] | None = None
        self._show: Any = None
        self._named: set[str] = set()

    def begin(self) -> None:
        """From now on."""
        fill = _memory.fill_uninitialized_memory
        enabled, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._before = enabled, warns, fill
        if not enabled:
            torch.use_deterministic_algorithms(True, warn_only=True)
            _memory.fill_uninitialized_memory = False
        self._show, warnings.showwarning = warnings.showwarning, self._name

    def end(self) -> None:
        """As it was before; harmless if it was not begun."""
        if self._before is None:
            return
        enabled, warns, fill = self._before
        self._before = None
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        _memory.fill_uninitialized_memory = fill
        if warnings.showwarning == self._name:
            warnings.showwarning = self._show

    def _name(self, message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        if _DETERMINISTIC not in text:
            self._show(message, *args, **kwargs)
            return
        operation = text.split(" does not have", 1)[0].split(", but you set", 1)[0]
        if operation not in self._named:
            self._named.add(operation)
            self._say(f"recording; a replay may differ: torch has no algorithm that repeats for {operation}")
