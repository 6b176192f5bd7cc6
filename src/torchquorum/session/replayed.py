"""A worker's process that `torchquorum replay` runs again: which life it is, and where it began.

Read once by `tq.join()`. What always holds: a process that is replayed writes nothing into the run's own folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torchquorum import env
from torchquorum.cluster import ClusterSpec
from torchquorum.errors import ConfigError


class ReplayFile(msgspec.Struct, kw_only=True):
    """What the replay writes for a life.

    Attributes:
        cluster: The addresses of the replay's ps tasks, and of all workers.
        worker: Which worker it is.
        incarnation: Which of its lives.
        folder: Takes the place of the run's folder.
        joined: The random state when it called `tq.join()`.
        began: The random state, and the position in the data, when its session began.
        last_step: Where the recorded run was to end.
        recorded: The folder of the recorded run, which is only read.
    """

    cluster: dict[str, list[str]]
    worker: int
    incarnation: int
    folder: str
    joined: dict[str, Any]
    began: dict[str, Any]
    last_step: int | None = None
    recorded: str = ""


@dataclass(frozen=True)
class Replayed:
    """A life that is run again."""

    file: ReplayFile

    @property
    def cluster(self) -> ClusterSpec:
        """Returns the replay's cluster."""
        return ClusterSpec(self.file.cluster)


def read_replay() -> Replayed | None:
    """Returns which life this process is, if it is replayed.

    Raises:
        ConfigError: The file that says so cannot be read.
    """
    path = env.replay()
    if path is None:
        return None
    try:
        return Replayed(msgspec.msgpack.decode(Path(path).read_bytes(), type=ReplayFile))
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{env.REPLAY}={path}: only `torchquorum replay` sets it, and what it names cannot be read ({error}); unset it"
        ) from None
