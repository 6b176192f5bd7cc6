"""A worker's place among the ps tasks: the client that trains, and beside it the beat that says it is alive.

Owned by the session, used on its thread. What always holds: at most one client and one beat are open; a connection that is made
again after a loss is of the same life, so that surviving ps tasks know the worker; the beat runs from joining to closing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from torchquorum.errors import ConfigError
from torchquorum.session.join import Task, say
from torchquorum.transport.messages import Plan
from torchquorum.worker.beat import Beat
from torchquorum.worker.client import Client, Patience
from torchquorum.worker.flat import FlatParameters


class Connection:
    """One worker's connection, made once or, after a loss, again."""

    def __init__(self, task: Task, kind: type[Client], patience: Patience, beat_every_s: float) -> None:
        self._task, self._kind, self._patience, self._beat_every_s = task, kind, patience, beat_every_s
        self._client: Client | None = None
        self._beat: Beat | None = None
        self._lead = 0

    @property
    def known(self) -> Client:
        """Returns the client, open or not; an error before the session has begun."""
        if self._client is None:
            raise ConfigError("the session has not begun: use it as `with tq.Session(...) as session:`")
        return self._client

    @property
    def running(self) -> Client:
        """Returns the client of a session that is under way; an error before and after."""
        client = self.known
        if self._beat is None:
            raise ConfigError("the session is over; ask inside its `with` block")
        return client

    @property
    def lead(self) -> int:
        """Returns the worker that does what is the chief's to do, as ps task 0 last said."""
        return self._beat.lead if self._beat is not None else self._lead

    @property
    def asked_to_leave(self) -> bool:
        """Whether ps task 0 wants this worker to go, because fewer are wanted."""
        return self._beat is not None and self._beat.leave

    def open(self, prepare: Callable[[Client], None]) -> Client:
        """Makes the client; after a loss, in the same life: surviving ps tasks know this worker.

        Args:
            prepare: Gives the client what it needs beyond the connection, before it goes on from an earlier one.
        """
        before = self._client
        client = self._kind(
            self._task.cluster,
            self._task.index,
            secrets.randbits(62) if before is None else before.incarnation,
            self._task.connect,
            transport=self._task.transport,
            patience=self._patience,
            say=say,
        )
        prepare(client)
        if before is not None:
            client.go_on_from(before)
        self._client = client
        return client

    def join(self, plan: Plan, flat: FlatParameters) -> None:
        """Takes the worker's place in the run, and starts the beat."""
        first = self._task.cluster.address(self._task.cluster.tasks("ps")[0])
        beats = self._task.connect(first, f"beat/{self._task.index}/{secrets.token_hex(8)}".encode())
        self._beat = Beat(beats, self._task.index, self.known.incarnation, self._beat_every_s, self._lead)
        self.known.join(plan, flat)

    def close(self) -> None:
        """Ends the beat and closes the client; harmless if there is none."""
        if self._beat is not None:
            self._beat.stop()
            self._lead = self._beat.lead
            self._beat = None
        if self._client is not None:
            self._client.close()
