"""What the record has for a worker beside variables: the batches and the buffers that it was given, handed out again in their order.

Owned by a ps task of the replay. What always holds: each is handed out once; who asks the same again gets the same again.
"""

from __future__ import annotations

from collections.abc import Callable

import torchquorum.wire.messages as m
from torchquorum.replay.script import LifeKey, ScriptedLife
from torchquorum.server.reply import Incoming, Reply

_BUFFERS = "\0buffers"  # beside the names of shares


class HandedAgain:
    """Where each life of a worker is in what it was given."""

    def __init__(self) -> None:
        self._given: dict[tuple[LifeKey, str], int] = {}
        self._last: dict[tuple[LifeKey, bool], tuple[int, list[Reply]]] = {}

    def batches(
        self, life: ScriptedLife, got: Incoming[m.TakeBatches], *, loses: Callable[[], bool]
    ) -> list[Reply] | None:
        """Returns the batches that the worker was given next; None if `loses` says that it has to wait for a loss instead."""
        take = got.message
        number, replies = self._last.get((life.key, True), (-1, []))
        if number == take.request:
            return replies
        items, at = life.handed.get(take.share.name, []), self._given.get((life.key, take.share.name), 0)
        answer = m.LeasedBatches(take.request, [], over=False, void=False)
        if at < len(items) and (items[at].numbers or items[at].void or take.idle):
            self._given[life.key, take.share.name] = at + 1
            answer = m.LeasedBatches(take.request, items[at].numbers, items[at].over, items[at].void)
        elif loses():
            return None
        replies = [got.reply(answer)]
        self._last[life.key, True] = take.request, replies
        return replies

    def buffers(self, life: ScriptedLife, got: Incoming[m.TakeBuffers]) -> list[Reply]:
        """Returns the buffers that the worker was given next; nothing if there are no more."""
        take = got.message
        number, replies = self._last.get((life.key, False), (-1, []))
        if number == take.number:
            return replies
        at = self._given.get((life.key, _BUFFERS), 0)
        if at >= len(life.buffers):
            return []
        self._given[life.key, _BUFFERS] = at + 1
        item = life.buffers[at]
        replies = [Reply(got.peer, m.SharedBuffers(take.number, item.whose), [item.values])]
        self._last[life.key, False] = take.number, replies
        return replies
