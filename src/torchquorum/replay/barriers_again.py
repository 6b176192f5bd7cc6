"""The ends of epochs, and barriers, of a replay: each worker goes on where it did in the record, once those have come who had.

Owned by ps task 0 of the replay. What always holds: a worker is answered what it was; nobody is waited for who had still to be told
something of the log that comes later.
"""

from __future__ import annotations

from collections import defaultdict

import torchquorum.wire.messages as m
from torchquorum.replay.script import LifeKey, Script
from torchquorum.wire.recorded import Opened

What = tuple[int, int, int, bool]


class BarriersAgain:
    """Who has come where.

    Args:
        script: What is followed.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._ahead: dict[tuple[LifeKey, What], list[tuple[int, Opened]]] = defaultdict(list)
        for life in script.lives.values():
            for at, item in life.opened:
                self._ahead[life.key, item.asked].append((at, item))
        self._all = {name: list(found) for name, found in self._ahead.items()}
        self._came: set[tuple[LifeKey, What]] = set()
        self._last: dict[LifeKey, tuple[int, m.BarrierStatus]] = {}
        self._waiting: dict[LifeKey, What] = {}

    def ask(self, asked: m.AtBarrier, at: int) -> m.BarrierStatus:
        """A worker asks whether it may go on, while the log is followed up to a step; returns the answer."""
        key, what = (asked.worker, asked.incarnation), (asked.epoch, asked.stage, asked.barrier, asked.wait)
        if (last := self._last.get(key)) is not None and last[0] == asked.request:
            return last[1]
        self._came.add((key, what))
        ahead = self._ahead[key, what]
        if ahead and at >= ahead[0][0] and (not asked.wait or self._have_come(what, ahead[0][0])):
            status = ahead.pop(0)[1].status
            status.request = asked.request
            self._last[key] = asked.request, status
            self._waiting.pop(key, None)
            return status
        self._waiting[key] = what
        return m.BarrierStatus(asked.request, False, asked.epoch, [], 0, [], at, False)

    def waits(self, key: LifeKey) -> bool:
        """Whether a worker waits, and is told nothing any more."""
        what = self._waiting.get(key)
        return what is not None and not self._ahead[key, what]

    def _have_come(self, what: What, at: int) -> bool:
        """Whether those are there for whom the record had not to go on."""
        for (key, theirs), found in self._all.items():
            if theirs != what or (key, what) in self._came or not found:
                continue
            life, opened_at = self._script.lives[key], found[0][0]
            between = (
                n for n in (*life.answers, *life.rows) if at <= n < opened_at and n not in self._script.passed_over
            )
            if 0 <= life.first < at and next(between, None) is None:
                return False
        return True
