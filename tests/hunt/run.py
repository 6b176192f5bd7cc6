"""One run of the hunt: a schedule in a world, until everyone has ended; then what is left is checked."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tests.hunt.aftermath import LIMIT_S, check_end, go_on
from tests.hunt.book import Book
from tests.hunt.cluster import Cluster
from tests.hunt.disk import Disk
from tests.hunt.faults import Faults
from tests.hunt.observe import observing
from tests.hunt.schedule import Schedule
from tests.hunt.world import World


@dataclass
class Result:
    """What came of a run.

    Attributes:
        broken: What was not as it must be; None if all was.
        lines: What happened, with the time.
        met: Which faults met which state.
    """

    schedule: Schedule
    broken: str | None = None
    events: int = 0
    steps: int = 0
    lines: list[tuple[float, str]] = field(default_factory=list)
    checks: Counter[str] = field(default_factory=Counter)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)


def play(schedule: Schedule) -> Result:
    """Plays a schedule on a thread of its own, as signals are for the main thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(_play(schedule))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="tq-hunt")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _play(schedule: Schedule) -> Result:
    with ExitStack() as stack:
        world = World(schedule.config.seed)
        disk = None
        if schedule.config.folder:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-hunt-"))
            disk = Disk(world, os.path.join(home, "run"))
            os.makedirs(disk.folder)
            stack.callback(disk.close)
            stack.enter_context(disk.mounted())
        return _play_in(world, disk, schedule)


def _play_in(world: World, disk: Disk | None, schedule: Schedule) -> Result:
    config = schedule.config
    book = Book(world, config)
    with observing(book):
        cluster = Cluster(world, config, book, disk)
        faults = Faults(cluster)
        try:
            cluster.begin()
            for fault in schedule.faults:
                faults.plan(fault)
            ended = world.run(lambda: cluster.over or bool(book.broken), LIMIT_S)
            check_end(cluster, ended=ended)
        except AssertionError as error:
            book.check("no assertion fails", False, f"{type(error).__name__}: {error}")
        finally:
            world.close()
        if disk is not None and not book.broken:
            world.lines = go_on(cluster).lines
    steps = max((g.version for g in book.generations.values()), default=0)
    return Result(
        schedule=schedule,
        broken=next(iter([*book.broken, *(book.heir.broken if book.heir is not None else [])]), None),
        events=world.events,
        steps=steps,
        lines=world.lines,
        checks=book.checks + (book.heir.checks if book.heir is not None else Counter()),
        met=faults.met,
        messages=cluster.network.counts,
    )
