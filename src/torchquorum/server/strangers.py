"""Who talks too much, and what strangers are told: what anybody may say to a ps, and no task has to say often, is counted by peer.

Owned by the ps thread. What always holds: a flood of questions costs a few hundred answers, then its connection; what is kept
of strangers is bounded and forgotten every second.
"""

from __future__ import annotations

import torchquorum.transport.messages as m
from torchquorum.cluster import TaskId
from torchquorum.server.me import Me
from torchquorum.server.shard import Shard
from torchquorum.transport.channel import Peer

MOST_IDLE_TALK = 100  # messages per second of one peer that are no part of training
LIVES_WATCHED = 8


class Strangers:
    """The counts of this second, and whom to hang up on."""

    def __init__(self) -> None:
        self.unwanted: list[Peer] = []
        self._said: dict[Peer, int] = {}

    def talked(self, peer: Peer) -> None:
        """Counts a greeting, a question or something that makes no sense."""
        said = self._said[peer] = self._said.get(peer, 0) + 1
        if said == MOST_IDLE_TALK:
            self.unwanted.append(peer)

    def forgive(self) -> None:
        """A second has passed: everybody may talk again."""
        self._said.clear()


def greet(me: Me, hello: m.Hello, pids: dict[tuple[int, int], int], *, created: bool) -> m.Message:
    """Answers a task's greeting; notes the process of a worker of this host, so that its death is known at once.

    Args:
        me: Who this ps is.
        hello: What came.
        pids: The processes of workers by worker and incarnation; of each worker only the last few lives are kept.
        created: Whether this ps holds variables.
    """
    if hello.protocol != m.PROTOCOL:
        return m.Fault("protocol", m.refuse_protocol(hello.task, hello.protocol, hello.package, str(me.task)))
    task = TaskId.parse(hello.task)
    me.cluster.check_task(task)
    if hello.host == me.host and me.host and task.job == "worker" and 0 < hello.pid < 1 << 31:
        lives = [key for key in pids if key[0] == task.index]
        for old in lives[: 1 - LIVES_WATCHED]:
            del pids[old]
        pids[(task.index, hello.incarnation)] = hello.pid
    return m.Welcome(m.PROTOCOL, str(me.task), me.incarnation, me.host, me.pid, created, me.door, m.PACKAGE, me.lane)


def not_joined(me: Me, shard: Shard | None, worker: int, incarnation: int, request: int) -> m.Fault:
    """Returns what to tell a process that talks as a worker and has not joined as one, or not as the last one."""
    if shard is not None and shard.replaced(worker, incarnation):
        text = (
            f"{me.task} has let a newer process in as /job:worker/task:{worker}, so this one is out. "
            "Start each worker once, with an index of its own."
        )
        return m.Fault("replaced", text, request)
    return m.Fault("LostPlaceError", f"{me.task} does not know this process as /job:worker/task:{worker}", request)
