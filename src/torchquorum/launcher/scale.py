"""How many workers a run shall have: asked of ps task 0 by `torchquorum scale`, and heard from it by the launcher.

Imports no torch. What always holds: ps task 0 keeps the number, so that whoever starts workers, here or elsewhere, hears the
same; asking never waits longer than it was told to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torchquorum.transport.messages as m
from torchquorum.cluster.secret import Access
from torchquorum.errors import DeadlineError, RefusedError
from torchquorum.launcher.watch import RunWatcher
from torchquorum.transport import codec
from torchquorum.transport.zmq_channel import ZmqChannel


def ask_to_scale(address: str, workers: int, access: Access, timeout_s: float) -> m.Scaled:
    """Says how many workers are wanted.

    Raises:
        RefusedError: The run does not have that many, or a fixed number.
        DeadlineError: Nobody answers.
        SecretError: The ps does not let us in.
    """
    channel = ZmqChannel(address, f"scale/{os.getpid()}/{time.monotonic_ns():x}".encode(), access, "/job:ps/task:0")
    try:
        channel.send(
            [codec.encode(m.Scale(workers))]
        )  # once: it is no harm if it is lost, but twice would be asked twice
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if (received := channel.receive(min(0.2, left_s))) is None:
                continue
            answer, _ = codec.split(received)
            if isinstance(answer, m.Scaled):
                return answer
            if isinstance(answer, m.Fault):
                raise RefusedError(answer.text)
    finally:
        channel.close()
    raise DeadlineError(
        f"no answer from {address} within {timeout_s:g} s; is a ps task of torchquorum running there? Give the address of "
        "ps task 0, as in --ps_hosts"
    )


class Wanted:
    """The launcher's ear: how many workers somebody has asked for.

    Args:
        where: Returns where ps task 0 listens by now, or None.
        access: Returns the cluster's secret, if it has one.
    """

    def __init__(self, where: Callable[[], str | None], access: Callable[[], Access]) -> None:
        self._watcher = RunWatcher(where, access=access)
        self._heard = 0

    def news(self) -> int | None:
        """Returns how many workers are wanted if somebody has asked since the last time; never waits."""
        if not self._watcher.poll():
            return None
        status = self._watcher.status
        asked = int(status.get("asked") or 0)
        if asked == self._heard or status.get("stopped"):
            return None
        self._heard = asked
        return status.get("wanted") if asked else None

    def close(self) -> None:
        """Closes the connection."""
        self._watcher.close()
