"""Ports for tests: each process has a block of its own, so that tests and suites beside each other do not meet.

A port is free when it is asked for and taken a moment later; between the two nobody else may be given it.
"""

from __future__ import annotations

import itertools
import os
import socket

# Below the ports that the kernel gives to outgoing connections.
FIRST, BLOCKS, SIZE = 20000, 60, 200


def claim_block() -> tuple[int, socket.socket | None]:
    """Returns a block that no other process has, and what to hold for as long; if all are taken, any, and nothing."""
    for turn in range(BLOCKS):
        block = (os.getpid() + turn) % BLOCKS
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0torchquorum-tests-ports/{block}")
        except OSError:
            claim.close()
            continue
        return block, claim
    return os.getpid() % BLOCKS, None


_block, _claim = claim_block()
_turn = itertools.count()


def free_ports(count: int) -> list[int]:
    """Returns ports of this host that are free, and that no other process of tests is given."""
    found: list[int] = []
    for turn in itertools.islice(_turn, 10 * SIZE):
        port = FIRST + _block * SIZE + turn % SIZE
        if port in found:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} ports are free from {FIRST + _block * SIZE} on")


def free_port() -> int:
    """Returns one."""
    return free_ports(1)[0]
