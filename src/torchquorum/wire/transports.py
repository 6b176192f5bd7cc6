"""The transports: how a task listens, which ways it offers, and how another one takes one.

Every task is first reached over TCP at its address (the entry), with TLS where the cluster has a secret. `Welcome` then lists faster
ways, in the order of `TRANSPORTS`; who can take none of them stays. A new transport is one file that defines a `Transport`, and one
line here.
"""

from __future__ import annotations

from collections.abc import Callable

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec
from torchquorum.cluster.secret import Access
from torchquorum.wire import tcp_stream
from torchquorum.wire.channel import Listener, ListenerPart
from torchquorum.wire.combined_listener import CombinedListener
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.transport import Listening, Transport
from torchquorum.wire.unix_stream import UNIX

TRANSPORTS: list[Transport] = [
    UNIX,
]


def find(kind: str) -> Transport | None:
    """Returns a transport by the kind that a Way names, or None if this version does not know it."""
    return next((transport for transport in TRANSPORTS if transport.kind == kind), None)


def connector(
    cluster: ClusterSpec, access: Access, clock: Clock = SYSTEM, silence_s: float | None = None
) -> Callable[[str, bytes], EntryChannel]:
    """Returns how the entry of a cluster's tasks is reached: a function of address and a name, which only networks of tests use.

    Args:
        cluster: Who exists.
        access: The secret, if the cluster has one.
        clock: Tells the time.
        silence_s: A connection on which nothing comes for so long, though something was sent, is made anew.
    """
    names = {cluster.address(task): str(task) for job in cluster.jobs for task in cluster.tasks(job)}

    def connect(address: str, _name: bytes) -> EntryChannel:
        return EntryChannel(address, access, names.get(address, "the task"), clock, silence_s)

    return connect


def listen(listening: Listening) -> Listener:
    """Returns the listener of a task: the entry at its address, and every transport that can be offered.

    Raises:
        SecretError: The address is not loopback and there is no secret.
        ClusterError: Nobody can listen there, or no file descriptor is left for it.
    """
    return _joined(listening, TRANSPORTS)


def listen_at_entry(listening: Listening) -> Listener:
    """Returns a listener at a task's address and nowhere else; raises as `listen` does."""
    return _joined(listening, [])


def _joined(listening: Listening, offered: list[Transport]) -> Listener:
    opened: list[ListenerPart] = []
    try:
        opened.append(tcp_stream.listen(listening))
        for transport in offered:
            if (part := transport.listen(listening)) is not None:
                opened.append(part)
        return CombinedListener(opened[0], opened[1:])
    except BaseException:
        for part in opened:
            part.close()
        raise
