"""Looks over the shoulders of the product's parts, and tells the book: what shards follow, what is created, what is published.

What always holds: the product does what it would do without being watched; after the block nothing is watched any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.hunt.book import Book
from torchquorum.memory.segments import Segment
from torchquorum.server import saver, service
from torchquorum.server.shard import Shard
from torchquorum.session import join
from torchquorum.worker import run_member


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute for a block."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def observing(book: Book) -> Iterator[None]:
    """Tells the book what happens, for a block; shared memory that is left over is given up at its end."""
    follow, create_run, publish = Shard.follow, service.create_run, saver.publish
    make: Callable[..., Segment] = Segment.create
    segments: list[Segment] = []

    def watch_follow(shard: Shard, entry: Any, *args: Any, **options: Any) -> Any:
        replies = follow(shard, entry, *args, **options)
        book.followed(shard, entry)
        return replies

    def watch_create(life: Any, create: Any, *args: Any) -> Any:
        run = create_run(life, create, *args)
        book.created(create, run)
        return run

    def watch_publish(partial: Any, manifest: Any) -> Any:
        path = publish(partial, manifest)
        book.published(manifest.generation, manifest.step)
        return path

    def watch_segments(name: str, size_bytes: int) -> Segment:
        segments.append(make(name, size_bytes))
        return segments[-1]

    def say(line: str, file: object = None) -> None:
        book.world.say(line)

    try:
        with (
            replaced(Shard, "follow", watch_follow),
            replaced(service, "create_run", watch_create),
            replaced(saver, "publish", watch_publish),
            replaced(Segment, "create", staticmethod(watch_segments)),
            replaced(join, "write_line", say),
            replaced(run_member, "supported", lambda: False),  # the fast path has an explorer of its own
        ):
            yield
    finally:
        for segment in segments:
            segment.close()
