"""The transports: how a ps listens, which ways it offers, and how a worker takes one.

Every task is first reached by ZeroMQ at its address (the entry, with the cluster's access control). `Welcome` then lists
faster ways, in the order of `TRANSPORTS`. A new transport is one file that defines a `Transport`, and one line here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec
from torchquorum.cluster.secret import Access
from torchquorum.wire.channel import Listener, ListenerPart
from torchquorum.wire.joined import JoinedListener
from torchquorum.wire.tcp_stream import TCP
from torchquorum.wire.transport import Listening, Transport
from torchquorum.wire.unix_stream import UNIX
from torchquorum.wire.zmq_channel import ZmqChannel
from torchquorum.wire.zmq_listener import ZmqListener

TRANSPORTS: list[Transport] = [
    UNIX,
    TCP,
]


def find(kind: str) -> Transport | None:
    """Returns a transport by the kind that a Way names, or None if this version does not know it."""
    return next((transport for transport in TRANSPORTS if transport.kind == kind), None)


def connector(cluster: ClusterSpec, access: Access, clock: Clock = SYSTEM) -> Callable[[str, bytes], ZmqChannel]:
    """Returns how the entry of a cluster's tasks is reached: a function of address and identity."""
    names = {cluster.address(task): str(task) for job in cluster.jobs for task in cluster.tasks(job)}

    def connect(address: str, identity: bytes) -> ZmqChannel:
        return ZmqChannel(address, identity, access, names.get(address, "the task"), clock)

    return connect


def listen(listening: Listening) -> Listener:
    """Returns the listener of a task: the entry at its address, and every transport that can be offered.

    Raises:
        SecretError: The address is not loopback and there is no secret.
        ClusterError: Nobody can listen there, or no file descriptor is left for it.
    """
    opened: list[ListenerPart] = []
    try:
        entry = ZmqListener(
            listening.address,
            listening.listen_fd,
            access=listening.access,
            say=listening.say,
            clock=listening.clock,
        )
        opened.append(entry)
        for transport in TRANSPORTS:
            if (part := transport.listen(listening)) is not None:
                opened.append(part)
        if sys.platform != "linux":  # pragma: no cover (other systems)
            return entry
        return JoinedListener(entry, opened[1:])
    except BaseException:
        for part in opened:
            part.close()
        raise
