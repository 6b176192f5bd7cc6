"""A worker's connections: the link that trains, and beside it the heartbeat that says the worker is alive.

Owned by the session, used on its thread. What always holds: at most one link and one heartbeat are open; a link that is made
again after a loss is of the same life, so that surviving ps tasks know the worker; the heartbeat runs from joining to closing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError
from torchquorum.session.join import Task, say
from torchquorum.wire.messages import Plan
from torchquorum.wire.rpc import Patience
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.heartbeat import Heartbeat
from torchquorum.worker.link import Link
from torchquorum.worker.worker_end import WorkerEnd


class WorkerConnection:
    """One worker's link and heartbeat, made once or, after a loss, again."""

    def __init__(
        self,
        task: Task,
        patience: Patience,
        beat_every_s: float,
        clock: Clock = SYSTEM,
        make_link: Callable[[WorkerEnd], Link] = Link,
    ) -> None:
        self._task, self._patience, self._beat_every_s, self._clock = task, patience, beat_every_s, clock
        self._make_link = make_link
        self._link: Link | None = None
        self._heartbeat: Heartbeat | None = None
        self._lead = 0

    @property
    def known(self) -> Link:
        """Returns the link, open or not; an error before the session has begun."""
        if self._link is None:
            raise ConfigError(
                "the session has not begun: use it as `with tq.Session(...) as session:`, or call session.start()"
            )
        return self._link

    @property
    def running(self) -> Link:
        """Returns the link of a session that is under way; an error before and after."""
        link = self.known
        if self._heartbeat is None:
            raise ConfigError("the session is over; ask inside its `with` block, or before session.close()")
        return link

    @property
    def lead(self) -> int:
        """Returns the worker that does the chief's tasks, as ps task 0 last said."""
        return self._heartbeat.lead if self._heartbeat is not None else self._lead

    @property
    def asked_to_leave(self) -> bool:
        """Whether ps task 0 wants this worker to go, because fewer are wanted."""
        return self._heartbeat is not None and self._heartbeat.leave

    def open(self, prepare: Callable[[Link], None]) -> Link:
        """Makes the link; after a loss, in the same life: surviving ps tasks know this worker.

        Args:
            prepare: Gives the link what it needs beyond the connection, before it goes on from an earlier one.
        """
        before = self._link
        link = self._make_link(
            WorkerEnd(
                cluster=self._task.cluster,
                index=self._task.index,
                incarnation=self._task.new_incarnation() if before is None else before.incarnation,
                connect=self._task.connect,
                transport=self._task.transport,
                patience=self._patience,
                say=say,
                clock=self._clock,
                random_bits=self._task.random_bits,
                beats=lambda: self._heartbeat.answered if self._heartbeat is not None else 0,
            )
        )
        prepare(link)
        link.leads = lambda: self._task.index == self.lead
        if before is not None:
            link.go_on_from(before)
        self._link = link
        return link

    def join(self, plan: Plan, flats: Sequence[FlatParameters]) -> None:
        """Joins the run, and starts the heartbeat."""
        task, link = self._task, self.known
        first = task.cluster.address(task.cluster.tasks("ps")[0])
        channel = task.connect(first, f"beat/{task.index}/{task.random_bits(64):016x}".encode())
        self._heartbeat = Heartbeat(
            channel,
            task.index,
            link.incarnation,
            self._beat_every_s,
            self._lead,
            clock=self._clock,
            thread=task.thread,
        )
        link.join(plan, flats)

    def close(self) -> None:
        """Ends the heartbeat and closes the link; harmless if there is none."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._lead = self._heartbeat.lead
            self._heartbeat = None
        if self._link is not None:
            self._link.close()
