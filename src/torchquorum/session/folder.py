"""The run's folder, as a session is given it: checked, and made to mean the same in every task."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from torchquorum.errors import ConfigError
from torchquorum.formats.in_use import user_of
from torchquorum.formats.storage import absolute, check_writable, is_memory, locate
from torchquorum.session.join import Task
from torchquorum.transport.zmq_channel import ZmqConnector

FREE_S = 10.0


def check_folder(task: Task, folder: str | os.PathLike[str] | None) -> str | None:
    """Returns the run's folder as every task of the run understands it; the chief tries whether a remote one can be written to.

    Raises:
        ConfigError: Nobody here knows such an address, it cannot be written to, or it lies in the memory of one process and
            there are several.
    """
    if folder is None:
        return None
    if is_memory(folder) and isinstance(task.connect, ZmqConnector):
        raise ConfigError(
            f"logdir={str(folder)!r}: memory:// is the memory of one process, and this run has {task.num_ps} ps and "
            f"{task.num_workers} worker processes; give a folder that all of them see, or s3://..., or train alone"
        )
    if task.is_chief:
        check_writable(locate(folder))
    return absolute(folder)


def check_free(folder: str | None, say: Callable[[str], None]) -> None:
    """The chief, before it begins a run, looks whether another one that is alive uses the folder; one that ends gets a moment.

    Raises:
        ConfigError: It is in use.
    """
    where = locate(folder) if folder is not None else None
    if not isinstance(where, Path):
        return
    deadline, told = time.monotonic() + FREE_S, False
    while (user := user_of(where)) is not None:
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"logdir={folder!r}: another run that is alive writes there ({user} holds it as its ps task 0), and two "
                "would mix their checkpoints and ledgers; give another logdir, or end that run first"
            )
        if not told:
            told = True
            say(f"{folder} is in use by another run ({user}); waiting up to {FREE_S:.0f} s for its end")
        time.sleep(0.1)
