"""Ps tasks that save, by hand: a run with a folder, and a way to let the saver's thread work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, name, only
from torchquorum.server.reply import Reply

Make = Callable[..., Ps]
DEADLINE_S = 60.0


def start(ps: Ps, logdir: Path, steps: int = 1, **changes: Any) -> None:
    """Two workers join a run with a folder and make some updates."""
    assert isinstance(ps.create(logdir=str(logdir), **changes)[0].message, m.Created)
    for worker in (0, 1):
        ps.join(worker)
    for step in range(1, steps + 1):
        for worker in (0, 1):
            ps.push(worker, step, step - 1)
    assert ps.shard.version == steps


def save(ps: Ps, number: int, folder: Path, *, keep: int = 5) -> m.SaveState:
    return only(ps.send(name(0), m.Save(0, 1, number, str(folder), keep)), m.SaveState, name(0))


def told(ps: Ps, number: int, folder: Path) -> m.SaveState:
    """Lets the saver work until a checkpoint is made or has failed; workers say where they stand."""
    until(ps, lambda: save(ps, number, folder).state != "running", pace_s=1.0)
    return save(ps, number, folder)


def until(
    ps: Ps, happened: Callable[[], object], alive: tuple[int, ...] = (0, 1), *, pace_s: float = 0.0
) -> list[Reply]:
    """Lets the saver work, and the clock run as is said, until something has happened; returns all replies.

    The clock stands while the saver's thread writes: nothing is late because a disk or a busy machine took its time.
    """
    replies: list[Reply] = []
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, ps.said
        for worker in alive:
            ps.send(name(worker), m.Beat(worker, 1))
        replies += ps.later(0.0 if ps.service.life.saver.busy else pace_s)
        time.sleep(0.001)
    return replies
