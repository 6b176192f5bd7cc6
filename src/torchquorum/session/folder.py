"""The run's folder as a session gets it: checked, and written so that it means the same in every task."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError
from torchquorum.formats.in_use import user_of
from torchquorum.formats.owner_object import SILENT_S, OwnerWatch
from torchquorum.formats.storage import RemotePath, absolute, check_writable, is_memory, locate
from torchquorum.session.join import Task

FREE_S = 10.0
LOOK_S, LOOK_AT_STORE_S = 0.1, 1.0


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
        ConfigError: It is in use; or the store that it lies on does not answer.
    """
    if folder is None or is_memory(folder):
        return
    where = locate(folder)
    watch = OwnerWatch(where, clock) if isinstance(where, RemotePath) else None
    deadline, said = clock.now() + wait_s, False
    while user := user_of(where) if isinstance(where, Path) else _read(watch, folder):
        if clock.now() >= deadline and (watch is None or watch.alive):
            raise ConfigError(
                f"logdir={folder!r}: another run that is alive writes there ({user} holds it as its ps task 0), and two "
                "would mix their checkpoints and ledgers; give another logdir, or end that run first"
            )
        if not said:
            said = True
            unknown = f"; if that is dead, this run begins in {SILENT_S:.0f} s" if watch is not None else ""
            say(f"{folder} is in use by another run ({user}); waiting up to {wait_s:.0f} s for its end{unknown}")
        clock.sleep(LOOK_S if watch is None else LOOK_AT_STORE_S)


def _read(watch: OwnerWatch | None, folder: str) -> str | None:
    assert watch is not None
    try:
        user = watch.user()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}; check the address and the credentials") from None
    return str(user) if user is not None else None
