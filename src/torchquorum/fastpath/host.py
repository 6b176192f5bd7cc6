"""The ps's side of the fast path: when workers may make updates by themselves, and how the ps takes over what they made.

Owned by the service of the one ps task of a run; has no sockets. What always holds: the fast path is open only while there is
nothing to decide (every live worker shares memory with this ps, nobody waits, nothing is being saved, and the plan allows it,
see `torchquorum.fastpath.policy`); the ps reports what the workers did to the same quorum, gradient by gradient, and the quorum
must decide what they assumed; everything else that happens closes the fast path first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torchquorum.wire.messages as m
from torchquorum.fastpath.page import CLOSED, NOBODY, OPEN, FastPage
from torchquorum.fastpath.policy import mode_of
from torchquorum.fastpath.records import GradientRecord
from torchquorum.rules.quorum import Key, Quorum
from torchquorum.update.updater import Updater

NO_LIMIT = 1 << 30
RATES_AT_ONCE, RATES_AHEAD = 512, 4096
# These change nothing that the fast path relies on: they are answered while it stays open.
HARMLESS = (
    m.Beat,
    m.Probe,
    m.PullRows,
    m.TakeEvicted,
    m.StatusRequest,
    m.Hello,
    m.FateOf,
    m.Position,
    m.Buffers,
    m.TakeBuffers,
    m.TakeBatches,
    m.UseBatches,
    m.AtBarrier,
    m.Scale,
    m.Settle,
    m.Stay,
    m.Values,
    m.ReaderHello,
    m.Read,
    m.ReadRows,
    m.ReaderBeat,
    m.Fault,
)


class _Known(Protocol):
    def knows(self, worker: int, incarnation: int, /) -> bool: ...


class _Workers(_Known, Protocol):
    def on_fastpath(self, worker: int, incarnation: int, /) -> bool: ...
    def gradients_of(self, worker: int, /) -> m.MemoryRef | None: ...


class _Versions(Protocol):
    @property
    def current(self) -> int: ...
    def leased(self, worker: int, /) -> int | None: ...
    def expect(self, version: int, slot: int, /) -> None: ...


class _Variables(Protocol):
    @property
    def update(self) -> Updater: ...
    @property
    def versions(self) -> _Versions: ...


class _Shard(Protocol):
    """The shard whose variables are updated. `busy`: it has something to apply, to measure or to end first."""

    @property
    def plan(self) -> m.Plan: ...
    @property
    def variables(self) -> _Variables: ...
    @property
    def version(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    @property
    def workers(self) -> _Workers: ...
    def store_shared(self, key: Key, request: int, /) -> None: ...


class _Leader(Protocol):
    """The leader. `refuses_next`: the next gradient of a live worker will be refused, which only the ps can do.

    `changes_settings`: the next update has other settings, which it cannot get on the fast path. `shares_data`: it hands batches out.
    """

    @property
    def quorum(self) -> Quorum: ...
    @property
    def lead(self) -> int: ...
    @property
    def awaits_assignment(self) -> bool: ...
    @property
    def shares_data(self) -> bool: ...
    def changes_settings(self, track: int, /) -> bool: ...
    def refuses_next(self, worker: int, /) -> bool: ...
    def arrived_by_fastpath(self, record: GradientRecord, track: int, /) -> None: ...


class Journal(Protocol):
    """The journal of the shard."""

    @property
    def number(self) -> int: ...  # noqa: D102
    @property
    def synced(self) -> bool: ...  # noqa: D102
    def lend(self) -> tuple[int, int]: ...  # noqa: D102
    def note_foreign(self) -> None: ...  # noqa: D102
    def take_back(self, end: int, version: int, /, *, settled: bool) -> None: ...  # noqa: D102


class _Joined(Protocol):
    @property
    def plan(self) -> m.Plan: ...
    @property
    def workers(self) -> _Known: ...


def may_change(message: m.AnyMessage, shard: _Joined | None) -> bool:
    """Whether a message may change what the fast path relies on; not if its worker is unknown, since it is refused then."""
    if shard is not None and isinstance(message, m.Push | m.Pull | m.Assign | m.Leave | m.Save | m.Stop):
        return shard.workers.knows(message.worker, message.incarnation)
    if shard is not None and isinstance(message, m.Join):
        return 0 <= message.worker < shard.plan.num_workers
    return not isinstance(message, HARMLESS)


class FastPathHost:
    """Opens, closes and reads the page of one optimizer of a shard.

    Args:
        page: The page.
        shard: The shard whose variables the workers update.
        leader: Decides about gradients.
        saves: Says whether a checkpoint is being made.
        track: Which optimizer's page it is.
        journal: The journal, in a durable run: lent to the workers while the page is open.
    """

    def __init__(
        self,
        page: FastPage,
        shard: _Shard,
        leader: _Leader,
        saves: Callable[[], bool],
        *,
        track: int = 0,
        journal: Journal | None = None,
    ) -> None:
        self._journal, self._made, self._settled = journal, 0, True
        self._page, self._shard, self._leader, self._saves, self.track = page, shard, leader, saves, track
        self._rounds = mode_of(shard.plan) == "rounds"
        last = shard.plan.last_step
        self._limit = NO_LIMIT if last is None else last - 1  # the ps makes the last update, with all that ends a run

    @property
    def is_open(self) -> bool:
        """Whether workers may be making updates now."""
        return self._page.words.state == OPEN

    def may_open(self) -> bool:
        """Whether there is nothing to decide."""
        quorum, shard = self._leader.quorum, self._shard
        track = quorum.tracks[self.track]
        if self._page.words.state != CLOSED or quorum.stopped or not quorum.live or track.version >= self._limit:
            return False
        if track.round or track.held or shard.busy or self._saves() or self._leader.awaits_assignment:
            return False
        if self._journal is not None and self._leader.shares_data:
            return False  # a record has the batches of shared data, which only the ps knows
        if self._leader.changes_settings(self.track) or shard.variables.update.steps_by_group is None:
            return False
        if self._rounds and quorum.live < shard.plan.num_workers:
            return False
        return all(
            shard.workers.on_fastpath(worker, quorum.workers[worker].incarnation)
            and not self._leader.refuses_next(worker)
            for worker in quorum.alive
        )

    def open(self) -> None:
        """Lets the workers that are alive make updates."""
        page, words, shard, quorum = self._page, self._page.words, self._shard, self._leader.quorum
        variables = shard.variables
        with page.locked() as held:
            if not held:
                return
            # First the id: a worker that waits without the lock must not take a version of this opening for its own.
            words.opening_id += 1
            if self._journal is not None:
                fd, end = self._journal.lend()
                page.journal.lend(self._journal.number, fd, end, waits=self._journal.synced)
            page.publish(shard.version, variables.versions.current, variables.update.state.current)
            for group, steps in enumerate(variables.update.steps_by_group or ()):
                page.steps[group] = steps - shard.version
            words.limit, words.writer, words.full, words.lead = self._limit, NOBODY, -1, self._leader.lead
            page.workers.begin_rounds()
            page.workers.clear_seats()
            for worker in range(page.num_workers):
                known = quorum.workers.get(worker)
                if known is not None and known.alive:
                    page.workers.admit(worker, known.incarnation, shard.workers.gradients_of(worker))
                else:
                    page.workers.admit(worker, 0, None)
                leased = variables.versions.leased(worker)
                page.workers.leases[worker] = -1 if leased is None else leased
            if shard.plan.schedule is None:
                page.rates.hold(shard.version, variables.update.rates.now)
            self._publish_rates()
            page.ps_looks()
            # Everything is in place: from this word on workers use the page, once the lock is free.
            words.state = OPEN
            page.news.announce()
            page.queue.announce()
        page.news.wake()
        page.queue.wake(1)

    def look(self) -> list[GradientRecord]:
        """Shows that the ps is alive, and returns what was made since the last look."""
        records = self._page.records
        self._page.ps_looks()
        if not records.pending:
            return []
        with self._page.locked() as held:
            added = records.added if held else None
        # Without the lock: workers append behind `added` meanwhile, and never overwrite what was not drained.
        found = [] if added is None else records.drain(added)
        self._publish_rates()
        if found and self._journal is not None:
            self._journal.note_foreign()
        return found

    def close(self) -> tuple[list[GradientRecord], list[GradientRecord]]:
        """Closes the fast path: workers make no more updates.

        Returns:
            What was made since the last look, and the gradients of a full round that the ps must now finish itself.
        """
        page, words = self._page, self._page.words
        if words.state != OPEN:
            return [], []
        with page.locked() as held:
            if held:
                words.state = CLOSED
            else:  # a worker is frozen while it holds the lock
                page.abandon()
            # Workers publish nothing any more: what is recorded counts, and a round that is full must be finished.
            found = page.records.drain()
            full = self._rounds and words.full == page.version + 1
            unfinished = page.records.given() if full else []
            self._shard.variables.update.state.current = self._state_after(found)
            self._made = max([page.version, *(record.version for record in found)])
            self._settled = not full if self._rounds else words.writer == NOBODY
            words.writer = NOBODY
            page.news.announce()
        page.news.wake()
        return found, unfinished

    def take_journal(self) -> None:
        """Has the journal back after `close`, once what was made is followed.

        Raises:
            JournalError: It cannot go on.
        """
        if self._journal is not None:
            self._journal.take_back(self._page.journal.words.end, self._made, settled=self._settled)

    def _state_after(self, records: list[GradientRecord]) -> int:
        """Returns the slot of the optimizer's state that belongs to the last version that counts; before the turn is taken away.

        That is one that was recorded, even if its worker died before it was published.
        """
        page, words = self._page, self._page.words
        if max((r.version for r in records), default=0) <= page.version:
            return page.state_slot
        return words.state_target if self._rounds else page.workers.state_uses[words.writer]

    def take_up(self, records: list[GradientRecord], *, made: bool) -> None:
        """Reports gradients to the leader in their order; those that are in no version yet are kept for the ps to apply."""
        for r in sorted(records, key=lambda r: (r.version, r.now)):  # so that the quorum sees the same waits
            if made:
                self._shard.variables.versions.expect(r.version, r.slot)
            else:
                self._shard.store_shared(r.key, r.request)
            self._leader.arrived_by_fastpath(r, self.track)

    def _publish_rates(self) -> None:
        """Writes a schedule's rates of the next updates, some at a time; workers read none before it is counted."""
        if self._shard.plan.schedule is None:
            return
        table, made, version = self._page.rates, self._page.version, self._shard.version
        if table.known < version:
            table.begin(version)
        most = min(max(table.known, made) + RATES_AT_ONCE, made + RATES_AHEAD)
        for update in range(table.known, most):
            rates = self._shard.variables.update.rates.ahead(update - version)
            if rates is None:
                break
            table.add(rates)
