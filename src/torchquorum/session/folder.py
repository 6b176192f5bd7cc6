"""The run's folder, as a session is given it: checked, and made to mean the same in every task."""

from __future__ import annotations

import os

from torchquorum.errors import ConfigError
from torchquorum.formats.storage import absolute, check_writable, is_memory, locate
from torchquorum.session.join import Task
from torchquorum.transport.zmq_channel import ZmqConnector


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
