"""One run of the hunt: a schedule in a world, until everyone has ended; then what is left is checked."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.hunt.book import Book
from tests.hunt.cluster import Cluster
from tests.hunt.faults import Faults
from tests.hunt.observe import observing
from tests.hunt.schedule import Schedule
from tests.hunt.world import World

LIMIT_S = 1500.0


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
    config = schedule.config
    world = World(config.seed)
    book = Book(world, config)
    cluster = Cluster(world, config, book, None)
    faults = Faults(cluster)
    with observing(book):
        try:
            cluster.begin()
            for fault in schedule.faults:
                faults.plan(fault)
            ended = world.run(lambda: cluster.over or bool(book.broken), LIMIT_S)
            _check_end(cluster, ended)
        except AssertionError as error:
            book.check("no assertion fails", False, f"{type(error).__name__}: {error}")
        finally:
            world.close()
    steps = max((g.version for g in book.generations.values()), default=0)
    return Result(
        schedule=schedule,
        broken=book.broken[0] if book.broken else None,
        events=world.events,
        steps=steps,
        lines=world.lines,
        checks=book.checks,
        met=faults.met,
        messages=cluster.network.counts,
    )


def _check_end(cluster: Cluster, ended: bool) -> None:
    """Everyone has ended, and well, as every fault is over."""
    book = cluster.book
    for process in cluster.world.processes:
        for error in process.errors:
            book.check("no task breaks", False, f"{process}: {type(error).__name__}: {error}")
    if book.broken:
        return
    waiting = [place.name for place in cluster.places.values() if place.running]
    book.check("every wait ends", ended, f"after {LIMIT_S:.0f} s {', '.join(waiting)} have not ended")
