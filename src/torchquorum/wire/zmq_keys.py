"""The keys of a cluster, made from its secret: a task that knows the secret can be either side of a connection, no other can.

Used by the ZeroMQ channel and listener. ZeroMQ's CURVE (curve25519, salsa20, poly1305) encrypts and authenticates: the side
that listens proves to have the server's key, the side that connects the client's. See docs/adr/0019.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import zmq
from zmq.utils import z85

from torchquorum.cluster.secret import Secret
from torchquorum.errors import SecretError


@dataclass(frozen=True)
class KeyPair:
    """A curve25519 key pair, as ZeroMQ writes it; it does not show itself."""

    public: bytes
    private: bytes

    def __repr__(self) -> str:
        return "KeyPair(hidden)"


@lru_cache(maxsize=8)
def derive_keys(secret: Secret) -> tuple[KeyPair, KeyPair]:
    """Returns the key pairs of the listening and of the connecting side.

    Raises:
        SecretError: This ZeroMQ cannot encrypt.
    """
    if not zmq.has("curve"):  # pragma: no cover (a ZeroMQ that was built without it)
        raise SecretError(
            f"a secret was given, and ZeroMQ {zmq.zmq_version()} of this host was built without CURVE, so nothing can be "
            "encrypted; pip install --force-reinstall pyzmq brings one that can"
        )
    return _derive(secret, "server"), _derive(secret, "client")


def _derive(secret: Secret, side: str) -> KeyPair:
    private = z85.encode(secret.derive(f"torchquorum/1/curve/{side}"))
    return KeyPair(zmq.curve_public(private), private)


def lock_listener(socket: zmq.Socket[Any], secret: Secret) -> bytes:
    """Makes a socket that has not been bound yet accept only those who know the secret; returns their public key, raw."""
    server, client = derive_keys(secret)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, server.private)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return z85.decode(client.public)


def lock_channel(socket: zmq.Socket[Any], secret: Secret) -> None:
    """Makes a socket that has not been connected yet talk only to one that knows the secret."""
    server, client = derive_keys(secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, client.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, client.private)
