"""Asks a ps task how the run is doing, or for one answer: used by launchers, the live view and the command line. Imports no torch.

What always holds: `poll` never waits unless it was told to; `ask_ps` ends with the answer or an error by its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torchquorum.wire.messages as m
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster.secret import Access, read_access
from torchquorum.errors import DeadlineError
from torchquorum.wire import codec
from torchquorum.wire.channel import Channel
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.rpc import SAME, Asker, Patience

REPEAT_S = 0.5
LEADER = "/job:ps/task:0"
_Kind = TypeVar("_Kind", bound=m.Message)


def connect_ps(address: str, access: Access) -> Channel:
    """Connects to a ps task as an observer, which is no part of the run."""
    return EntryChannel(address, access, LEADER)


def ask_ps(
    channel: Channel,
    address: str,
    message: m.Message,
    kind: type[_Kind],
    timeout_s: float,
    *,
    repeat: bool = True,
    clock: Clock = SYSTEM,
) -> _Kind:
    """Asks a ps task and returns its answer.

    Args:
        channel: The connection to it.
        address: Where it listens, for the message.
        message: The question.
        kind: The kind of the answer.
        timeout_s: When to give up.
        repeat: Whether to ask again while no answer comes; False for a question that must be asked once.
        clock: Tells the time.

    Raises:
        RefusedError: The ps refuses.
        DeadlineError: There is no answer in time.
        SecretError: The ps does not accept our secret.
    """
    patience = Patience(probe_s=min(REPEAT_S, timeout_s))
    asker = Asker(channel=channel, me="torchquorum", there=f"{LEADER} ({address})", patience=patience, clock=clock)
    again = SAME if repeat else None
    try:
        return asker.at_start().ask(message, kind=kind, what="an answer", limit_s=timeout_s, again=again)[0]
    except DeadlineError:
        raise DeadlineError(
            f"no answer from {address} within {timeout_s:g} s; is a ps task of torchquorum running there? Give the address of "
            f"ps task 0, as in --ps_hosts. `torchquorum doctor --ps_hosts={address}` looks closer"
        ) from None


class Watcher:
    """Polls a run's status without blocking.

    Args:
        address: Where ps task 0 listens.
        every_s: How often to ask.
        access: The cluster's secret, if it has one; None takes that of the environment.
        clock: Tells the time.
        connect: Makes the connection.
    """

    def __init__(
        self,
        address: str,
        every_s: float = 0.5,
        access: Access | None = None,
        *,
        clock: Clock = SYSTEM,
        connect: Callable[[str, Access], Channel] = connect_ps,
    ) -> None:
        self._address, self.every_s, self._clock = address, every_s, clock
        self._channel = connect(address, read_access() if access is None else access)
        self._next_ask = self._heard_at = clock.now()
        self.status: dict[str, Any] = {}

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Asks if it is time to, takes what has come; returns whether something has.

        Raises:
            SecretError: The ps does not accept our secret.
        """
        now = self._clock.now()
        if now >= self._next_ask:
            self._next_ask = now + self.every_s
            self._channel.send([codec.encode(m.StatusRequest())])
        news = False
        while (frames := self._channel.receive(0.0 if news else timeout_s)) is not None:
            message, _ = codec.split(frames)
            if isinstance(message, m.Status):
                self.status, news, self._heard_at = message.body, True, self._clock.now()
        return news

    def ask(self, timeout_s: float) -> dict[str, Any]:
        """Asks until an answer has come, and returns it; see `ask_ps` for what it raises."""
        self.status = ask_ps(
            self._channel, self._address, m.StatusRequest(), m.Status, timeout_s, clock=self._clock
        ).body
        self._heard_at = self._clock.now()
        return self.status

    @property
    def silent_s(self) -> float:
        """For how long no answer has come."""
        return self._clock.now() - self._heard_at

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()


class RunWatcher:
    """Polls the status of a run whose ps task 0 may not be there yet, or may move.

    Args:
        where: Returns where ps task 0 listens now, or None.
        every_s: How often to ask.
        access: Returns the cluster's secret, once the address is known.
    """

    def __init__(
        self, where: Callable[[], str | None], every_s: float = 0.5, access: Callable[[], Access] = read_access
    ) -> None:
        self._where, self.every_s, self._access = where, every_s, access
        self._watched: str | None = None
        self._watcher: Watcher | None = None
        self.status: dict[str, Any] = {}

    @property
    def silent_s(self) -> float:
        """For how long no answer has come from the ps task 0 that there is."""
        return self._watcher.silent_s if self._watcher is not None else 0.0

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Asks if it is time to, takes what has come; returns whether something has.

        Raises:
            SecretError: The ps does not accept our secret.
        """
        address = self._where()
        if address != self._watched:
            self.close()
            self._watched = address
            self._watcher = Watcher(address, self.every_s, self._access()) if address is not None else None
        if self._watcher is None:
            SYSTEM.sleep(timeout_s)
            return False
        if not self._watcher.poll(timeout_s):
            return False
        self.status = self._watcher.status
        return True

    def close(self) -> None:
        """Closes the connection."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
