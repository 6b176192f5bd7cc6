"""Who a worker is and how it reaches the ps tasks: the fixed facts that every part of its link needs.

Made by the session once per connection. What always holds: nothing in it changes while the link lives.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torchquorum.wire.messages as m
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.errors import ConfigError
from torchquorum.memory.segments import host_id
from torchquorum.wire.channel import Channel
from torchquorum.wire.rpc import Patience

Connect = Callable[[str, bytes], Channel]


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """One worker's end of the connections to the ps tasks.

    Attributes:
        cluster: Who exists.
        index: Which worker this is.
        incarnation: The id of this life of the worker.
        connect: Makes a channel from an address and an identity.
        transport: auto, shm or tcp.
        patience: How long to wait.
        say: Prints a line for people.
        clock: Tells the time.
        pid: The worker's own process.
        random_bits: Returns a random number of so many bits, for ids.
        beats: Counts the heartbeats that ps task 0 has answered.
    """

    cluster: ClusterSpec
    index: int
    incarnation: int
    connect: Connect
    transport: str = "auto"
    patience: Patience = field(default_factory=Patience)
    say: Callable[[str], None] = print
    clock: Clock = SYSTEM
    random_bits: Callable[[int], int] = secrets.randbits
    beats: Callable[[], int] = lambda: 0

    pid: int = field(default_factory=os.getpid)

    def check_process(self) -> None:
        """Checks that this is the worker's own process.

        Raises:
            ConfigError: It is a fork of it, which never speaks for it.
        """
        if (pid := os.getpid()) != self.pid:
            raise ConfigError(
                f"process {pid} is a fork of {self.task}, process {self.pid}, and only that one takes part in the run: compute "
                "in the child what you like, and call step(), pull(), save() and the like in the worker itself"
            )

    @property
    def task(self) -> TaskId:
        """Returns the worker's name."""
        return TaskId("worker", self.index)

    @property
    def ps(self) -> Sequence[TaskId]:
        """Returns the names of the ps tasks."""
        return self.cluster.tasks("ps")

    def where(self, k: int) -> str:
        """Returns the name of ps task k with its address."""
        return f"{self.ps[k]} ({self.cluster.address(self.ps[k])})"

    def greeting(self) -> m.Hello:
        """Returns the first message on a connection."""
        return m.Hello(m.PROTOCOL, str(self.task), self.incarnation, host_id(), os.getpid(), m.PACKAGE)

    def tell(self, line: str) -> None:
        """Prints a line for people, with the worker's name."""
        self.say(f"{self.task}: {line}")
