"""Addresses of tasks: where to bind, where to connect, who may be reached without a secret, and how large a frame may be.

Used by the transports, the launchers and the commands that check a set-up.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

from torchquorum.cluster.secret import ADVICE, Access
from torchquorum.errors import ClusterError, SecretError
from torchquorum.wire.procnet import listening_process

MAX_FRAME_BYTES = 16 << 30
REFUSE_S = 0.5


def largest_frame_bytes() -> int:
    """Returns how large a frame may be: a shard of more than a quarter of the memory could not be trained anyway."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return MAX_FRAME_BYTES
    return max(1 << 28, min(MAX_FRAME_BYTES, memory // 4))


def is_loopback(host: str) -> bool:
    """Whether only tasks of this host can reach a socket that is bound to this address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def bind_place(address: str) -> tuple[str, int]:
    """Returns where a task with that address listens: loopback names on loopback, all others on every interface.

    Raises:
        ClusterError: The port is none.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port[:6]) <= 65535):
        raise ClusterError(f"cannot listen on {address}: port {port!r}: must be a number up to 65535")
    bare = host.strip("[]")
    if bare == "localhost":
        return "127.0.0.1", int(port)
    if is_loopback(bare):
        return bare, int(port)
    return "::" if ":" in bare else "0.0.0.0", int(port)


def find_place(address: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Returns where `host:port` is, resolved, so that a name which does not exist is an error here.

    Raises:
        ClusterError: There is no such host.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ClusterError(
            f"host {host!r} in {address!r} cannot be found ({error}); check its spelling and your DNS"
        ) from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return found[0][0], found[0][4]


def require_secret(address: str, bound: str, listen_fd: int | None, access: Access) -> None:
    """Checks that a task listens for other hosts only with a secret, or where that was allowed.

    Raises:
        SecretError: It would listen for other hosts without one.
    """
    if access.secret is not None or access.insecure:
        return
    if listen_fd is not None:
        with socket.socket(fileno=os.dup(listen_fd)) as held:
            bound = str(held.getsockname()[0])
    if not is_loopback(bound):
        raise SecretError(
            f"cannot listen on {address} without a secret: any host that reaches it could read the "
            f"variables and change the run. {ADVICE}"
        )


def refuses(address: str) -> bool:
    """Whether the host of a task answers that nobody listens there: the task's process is gone, not only paused or cut off."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REFUSE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def explain_in_use(address: str) -> str:
    """Returns what to tell when the port of an address is in use."""
    holder = listening_process(int(address.rpartition(":")[2]))
    who = f"held by {holder}" if holder else "held by a process that this user may not look at"
    return (
        f"cannot listen on {address}: the port is in use, {who}. "
        f"End that process, or give this task another port in --ps_hosts or --worker_hosts (on every task)."
    )
