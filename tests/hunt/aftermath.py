"""What must be true when everyone has ended: nobody waits, what was reached is saved, the files agree, and the run can go on.

What always holds: a run that goes on from the folder goes on as if it had never been interrupted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.hunt.book import Book
from tests.hunt.cluster import Cluster
from tests.hunt.world import World
from torchquorum.formats.checkpoint import newest_good
from torchquorum.formats.ledger import NAME, Entry, name_life, read_records
from torchquorum.server.leading import Leading
from torchquorum.server.snapshot import SavedTrack

LIMIT_S = 2500.0
MORE_STEPS = 6


def check_end(cluster: Cluster, *, ended: bool) -> None:
    """Checks what a run has left."""
    book = cluster.book
    for process in cluster.world.processes:
        for error in process.errors:
            book.check("no task breaks", False, f"{process}: {type(error).__name__}: {error}")
    if book.broken:
        return
    waiting = [place.name for place in cluster.places.values() if place.running]
    book.check("every wait ends", ended, f"after {LIMIT_S:.0f} s {', '.join(waiting)} have not ended")
    if ended_well(cluster) and book.current is not None:
        at, due = book.current.version, cluster.config.steps
        book.check("it ends well only at its end", at >= due, "it ended well at {} of {}", at, due)
    if cluster.folder is not None:
        _check_ledger(book, Path(cluster.folder))
        _check_saved(cluster, Path(cluster.folder))


def ended_well(cluster: Cluster) -> bool:
    """Whether the log of the run has come to its end, and that was a good one."""
    run = cluster.servers["ps/0"].service.run if "ps/0" in cluster.servers else None
    return isinstance(run, Leading) and run.shard.ended is not None and run.shard.ended.ok


def _check_ledger(book: Book, folder: Path) -> None:
    """Each gradient that counts has one line, in the part of the ledger that its generation wrote."""
    if not (folder / NAME).exists():
        return
    accepted: set[tuple[int, str, int]] = set()
    for record in read_records(folder, damaged=lambda _: None):
        if isinstance(record, Entry):
            key = record.worker, record.incarnation, record.local_step
            book.check("the ledger agrees", not (record.accepted and key in accepted), f"{key} is accepted twice")
            accepted |= {key} if record.accepted else set()
        elif record.event == "began":
            accepted = set()
    last = book.current
    if last is None or book.excuse or book.was_full or not any(type(e).__name__ == "End" for e in last.entries):
        return
    counted = {(k.worker, name_life(k.incarnation), k.local_step) for k, at in last.where.items() if last.is_new(*at)}
    book.check("the ledger agrees", counted <= accepted, f"{sorted(counted - accepted)} count, and have no line")


def _check_saved(cluster: Cluster, folder: Path) -> None:
    """Nobody leaves with success while a result is unsaved."""
    book, last = cluster.book, cluster.book.current
    if last is None or book.excuse or not ended_well(cluster):
        return
    found, _ = newest_good(folder)
    step = found[1].step if found is not None else None
    full = cluster.disk is not None and book.ended_at < cluster.disk.full_until + 5.0
    book.check(
        "what is reached is saved",
        step == last.version or full,
        f"it ended well at {last.version}, and {step} is saved",
    )
    if found is not None and not full:
        for k, past in enumerate(last.pasts[1:], 1):
            saved = SavedTrack.of(found[1], k).version
            at = f"it ended well with optimizer {k} at {past.version}, and {saved} is saved"
            book.check("what is reached is saved", saved == past.version, at)


def go_on(cluster: Cluster) -> World:
    """Starts a run that has ended once more, without faults, for a few more steps; checks that it goes on as it was."""
    before, disk = cluster.book, cluster.disk
    assert disk is not None
    world = World(cluster.config.seed + 1)
    world.now, world.lines = cluster.world.now + 10.0, [*cluster.world.lines]
    config = replace(cluster.config, steps=cluster.config.steps + MORE_STEPS)
    book = before.continued(world, config)
    disk.world, disk.full_until, world.folder = world, 0.0, disk.folder
    again = Cluster(world, config, book, disk)
    cluster.book.heir = book
    world.say("RESUMED: all tasks are started once more, without faults")
    found, _ = newest_good(Path(disk.folder))
    again.begin()
    try:
        ended = world.run(lambda: again.over or bool(book.broken), LIMIT_S)
        check_end(again, ended=ended)
        last = book.current
        if not book.broken and last is not None:
            book.check(
                "a resumed run ends", last.version == config.steps, f"it ended at {last.version} of {config.steps}"
            )
            for worker, body in found[1].workers.items() if found is not None and config.in_step else ():
                if body.get("version") == last.base:
                    place = body["data"]["data"]["position"]
                    first = book.drawn.get(int(worker), place)
                    book.check(
                        "resumed equals uninterrupted", first == place, f"worker/{worker} is at {first}, not {place}"
                    )
    finally:
        world.close()
    return world
