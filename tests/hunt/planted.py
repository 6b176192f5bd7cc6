"""Mistakes that are made on purpose, each a patch of the product: the hunt has to find every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.hunt.observe import replaced
from torchquorum.rules.quorum import Quorum
from torchquorum.server.leader import Leader
from torchquorum.server.leading import Leading
from torchquorum.server.outbox import Outbox
from torchquorum.server.pending_gradients import PendingGradients
from torchquorum.server.reply import Delivery
from torchquorum.server.shard_variables import ShardVariables
from torchquorum.update.updater import Updater
from torchquorum.wire.messages import Fate
from torchquorum.worker.requests import Requests


@contextmanager
def fence_of_the_dead_dropped() -> Iterator[None]:
    """A worker that counted as dead while it computed is not fenced."""
    bury = Quorum._bury

    def forgiving(quorum: Quorum, worker: int, why: str) -> Any:
        died = bury(quorum, worker, why)
        quorum.workers[worker].fenced = False
        return died

    with replaced(Quorum, "_bury", forgiving):
        yield


@contextmanager
def update_applied_twice() -> Iterator[None]:
    """Now and then an update is made twice."""
    apply, count = Updater.apply, 0

    def twice(update: Updater, old: Any, new: Any, gradients: Any, absent: Any) -> Any:
        nonlocal count
        count += 1
        mean = apply(update, old, new, gradients, absent)
        if count % 50 == 0:
            for values, step in zip(new, mean, strict=True):
                values.sub_(step)
        return mean

    with replaced(Updater, "apply", twice):
        yield


@contextmanager
def repeated_push_counted_again() -> Iterator[None]:
    """A gradient that was decided on, and comes again, is taken for a new one."""
    arrived = Leader.arrived

    def forgetful(leader: Leader, shard: int, key: Any, *args: Any, **options: Any) -> None:
        known = leader.quorum.workers.get(key.worker)
        if known is not None and known.incarnation == key.incarnation:
            known.local_step = min(known.local_step, key.local_step - 1)
        arrived(leader, shard, key, *args, **options)

    def unknowing(leader: Leader, key: Any) -> Fate:
        return Fate(key.worker, key.incarnation, key.local_step, "open")

    with (
        replaced(PendingGradients, "is_decided", lambda gradients, key: False),
        replaced(Leader, "arrived", forgetful),
        replaced(Leader, "fate", unknowing),
    ):
        yield


@contextmanager
def answer_before_its_record() -> Iterator[None]:
    """In a run that is to survive a loss of power, workers are answered before the disk has the journal."""

    def hasty(outbox: Outbox, replies: Any) -> None:
        outbox._send_now(replies)

    with replaced(Outbox, "send", hasty):
        yield


@contextmanager
def record_after_its_version() -> Iterator[None]:
    """The journal gets an update only with the next one: the version is given to workers before its record is there."""
    from torchquorum.formats.journal_write import JournalWriter

    append = JournalWriter.append
    late: dict[int, tuple[Any, bytes]] = {}

    def later(journal: JournalWriter, record: Any, payload: Any) -> None:
        before = late.pop(id(journal), None)
        late[id(journal)] = record, bytes(payload)
        if before is not None:
            append(journal, *before)

    with replaced(JournalWriter, "append", later):
        yield


@contextmanager
def old_generation_believed() -> Iterator[None]:
    """A worker takes the answers of shards of two generations for one version."""

    def blind(requests: Requests, waiting: Any) -> Any:
        return waiting.next_missing()

    hear = Requests._hear

    def keeps(requests: Requests, waiting: Any, k: int, received: Any) -> Any:
        before = dict(waiting.found)
        heard = hear(requests, waiting, k, received)
        for other, answer in before.items():
            waiting.found.setdefault(other, answer)
        return heard

    with replaced(Requests, "_owing", blind), replaced(Requests, "_hear", keeps):
        yield


@contextmanager
def half_a_version_published() -> Iterator[None]:
    """A version is published before all of it is written."""
    publish = ShardVariables.publish

    def hasty(variables: ShardVariables, slot: int, version: int) -> None:
        publish(variables, slot, version)
        if version % 50 == 0:
            variables.versions.slots.sections[slot][0][:1].zero_()

    with replaced(ShardVariables, "publish", hasty):
        yield


@contextmanager
def departure_by_exception_is_no_death() -> Iterator[None]:
    """A worker that leaves because its program failed has left as one that is done."""
    leave = Leading.leave

    def kind(run: Leading, got: Any) -> Any:
        got.message.finished = True
        return leave(run, got)

    with replaced(Leading, "leave", kind):
        yield


@contextmanager
def answer_sent_again_on_its_way() -> Iterator[None]:
    """A worker that asks is sent its answer again, although that is on its way."""
    with replaced(Delivery, "is_under_way_to", lambda delivery, peer: False):
        yield


MISTAKES: dict[str, Callable[[], Any]] = {
    made.__name__: made
    for made in (
        fence_of_the_dead_dropped,
        update_applied_twice,
        repeated_push_counted_again,
        answer_before_its_record,
        record_after_its_version,
        old_generation_believed,
        half_a_version_published,
        departure_by_exception_is_no_death,
        answer_sent_again_on_its_way,
    )
}
