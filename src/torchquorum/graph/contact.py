"""A client's connection to one compute task, and what the client knows of that task.

Owned by the dispatcher's thread; the client's own thread reads it under the lock of `torchquorum.graph.graph_run`. What always
holds: `life` is empty while the task is absent; a process on this host is watched while its task is present.
"""

from __future__ import annotations

import os
import select

from torchquorum.cluster import TaskId
from torchquorum.wire import codec
from torchquorum.wire.channel import Channel
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import Message


class Contact:
    """One compute task as the client sees it.

    Attributes:
        life: The incarnation of its process, while it is present.
        state: absent, attached, refused (it cannot join), or what it reports: loading, joining, ready, finishing, finished, failed.
        text: The same, for people.
        device: Where it computes.
        heard_at: When something last came from it.
        stamp: Its clock in its last State.
        finished: Whether it has left the run.
    """

    def __init__(self, task: TaskId, address: str, channel: Channel) -> None:
        self.task, self.address, self.channel = task, address, channel
        self.life = ""
        self.state = "absent"
        self.text = "has not answered yet"
        self.device = "cpu"
        self.heard_at = 0.0
        self.stamp = 0.0
        self.finished = False
        self._pidfd: int | None = None

    def send(self, message: Message, frames: list[Frame] | None = None) -> None:
        """Sends a message to the task."""
        self.channel.send([codec.encode(message), *(frames or [])])

    def watch(self, pid: int) -> None:
        """Watches the task's process, which is on this host."""
        self.unwatch()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            self._pidfd = None

    def ended(self) -> bool:
        """Whether the task's process, if it is on this host, has ended."""
        return self._pidfd is not None and bool(select.select([self._pidfd], [], [], 0)[0])

    def unwatch(self) -> None:
        """Stops watching."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def close(self) -> None:
        """Closes the connection."""
        self.unwatch()
        self.channel.close()

    @property
    def place(self) -> str:
        """Returns where its batches are computed, as placement logs write it."""
        kind, _, index = self.device.partition(":")
        return f"{self.task}/device:{kind.upper()}:{index or 0}"

    def __str__(self) -> str:
        return f"{self.task} ({self.address}) {self.text}"
