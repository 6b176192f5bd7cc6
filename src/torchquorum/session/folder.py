"""The run's folder as a session gets it: checked, and written so that it means the same in every task."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError
from torchquorum.formats.in_use import user_of
from torchquorum.formats.storage import absolute, check_writable, is_memory, locate
from torchquorum.session.join import Task

FREE_S = 10.0


def check_folder(task: Task, folder: str | os.PathLike[str] | None) -> str | None:
    """Returns the run's folder as every task understands it; by default the launcher's. The chief checks that it can be written.

    Raises:
        ConfigError: The kind of address is unknown, it cannot be written to, or it lies in the memory of one process and there are
            several.
    """
    folder = env.logdir() if folder is None else folder
    if folder is None:
        return None
    if task.replay is not None:
        return absolute(task.replay.file.folder)
    if is_memory(folder) and task.separate:
        raise ConfigError(
            f"logdir={str(folder)!r}: memory:// is the memory of one process, and this run has {task.num_ps} ps and "
            f"{task.num_workers} worker processes; give a folder that all of them see, or s3://..., or train alone"
        )
    if task.is_chief:
        check_writable(locate(folder))
    return absolute(folder)


def check_free(
    folder: str | None, say: Callable[[str], None], clock: Clock = SYSTEM, *, wait_s: float = FREE_S
) -> None:
    """The chief, before it begins a run, checks that no other run that is alive uses the folder; one that is ending is waited for.

    Raises:
        ConfigError: It is in use.
    """
    where = locate(folder) if folder is not None else None
    if not isinstance(where, Path):
        if where is not None and not is_memory(str(folder)):
            say(f"{folder} is on an object store, which has no locks: see to it that no other run writes there")
        return
    deadline, said = clock.now() + wait_s, False
    while (user := user_of(where)) is not None:
        if clock.now() >= deadline:
            raise ConfigError(
                f"logdir={folder!r}: another run that is alive writes there ({user} holds it as its ps task 0), and two "
                "would mix their checkpoints and ledgers; give another logdir, or end that run first"
            )
        if not said:
            said = True
            say(f"{folder} is in use by another run ({user}); waiting up to {wait_s:.0f} s for its end")
        clock.sleep(0.1)
