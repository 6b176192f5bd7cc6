"""Looks over the shoulders of the product's parts, and tells the book: what shards follow, what is created, what is published.

What always holds: the product does what it would do without being watched; after the block nothing is watched any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.hunt.book import Book
from torchquorum.fastpath import policy
from torchquorum.memory.segments import Segment
from torchquorum.rules.quorum import Accepted
from torchquorum.server import saver, service
from torchquorum.server.decision_effects import DecisionEffects
from torchquorum.server.leader import Leader
from torchquorum.server.run_history import RunHistory
from torchquorum.server.shard import Shard
from torchquorum.session import join


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute for a block."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Watched:
    """The book that is told: of the run, or of the one that goes on from it."""

    def __init__(self, book: Book) -> None:
        self._first = book

    @property
    def book(self) -> Book:
        return self._first.heir or self._first


@contextmanager
def observing(first: Book) -> Iterator[None]:
    """Tells the book, and its heir, what happens, for a block; shared memory that is left over is given up at its end."""
    watched = Watched(first)
    follow, create_run, publish = Shard.follow, service.create_run, saver.publish
    died, decided, joined = DecisionEffects.died, RunHistory.decided, Leader.join
    make: Callable[..., Segment] = Segment.create
    segments: list[Segment] = []

    def watch_follow(shard: Shard, entry: Any, *args: Any, **options: Any) -> Any:
        try:
            replies = follow(shard, entry, *args, **options)
        except Exception as error:
            watched.book.could_not_follow(shard, entry, error)
            raise
        watched.book.followed(shard, entry)
        return replies

    def watch_create(life: Any, create: Any, *args: Any) -> Any:
        run = create_run(life, create, *args)
        watched.book.created(create, run)
        return run

    def watch_publish(partial: Any, manifest: Any) -> Any:
        path = publish(partial, manifest)
        watched.book.published(manifest, path)
        return path

    def watch_segments(name: str, size_bytes: int) -> Segment:
        segments.append(make(name, size_bytes))
        return segments[-1]

    def watch_died(effects: DecisionEffects, worker: int, incarnation: int, why: str, wall: float) -> None:
        watched.book.died(worker, incarnation)
        died(effects, worker, incarnation, why, wall)

    def watch_joined(leader: Leader, worker: int, incarnation: int, *args: Any) -> None:
        joined(leader, worker, incarnation, *args)
        watched.book.joined(worker, incarnation)

    def watch_decided(history: RunHistory, action: Any, *args: Any, **options: Any) -> None:
        watched.book.decided(action.key, accepted=isinstance(action, Accepted))
        decided(history, action, *args, **options)

    def say(line: str, file: object = None) -> None:
        watched.book.world.say(line)

    try:
        with (
            replaced(Shard, "follow", watch_follow),
            replaced(service, "create_run", watch_create),
            replaced(saver, "publish", watch_publish),
            replaced(Segment, "create", staticmethod(watch_segments)),
            replaced(DecisionEffects, "died", watch_died),
            replaced(Leader, "join", watch_joined),
            replaced(RunHistory, "decided", watch_decided),
            replaced(join, "write_line", say),
            replaced(policy, "supported", lambda: False),  # the fast path has an explorer of its own
        ):
            yield
    finally:
        for segment in segments:
            segment.close()
