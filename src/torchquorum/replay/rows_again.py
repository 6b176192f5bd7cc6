"""The rows of tables that the workers of a replay ask for: each request is answered where the record has its answer.

Owned by a ps task of the replay. What always holds: the requests of a worker are answered in the order of the record, so it gets rows of
the place of the log that they were of; one that the record does not have at its place ends the replay with words.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torchquorum.wire.messages as m
from torchquorum.errors import LostPlaceError, TorchQuorumError
from torchquorum.replay.script import LifeKey
from torchquorum.server.reply import Incoming, Reply
from torchquorum.server.run import Run
from torchquorum.wire.recorded import GaveRows

Asked = Incoming[m.PullRows]
NOT_KNOWN = -1  # as the version of an answer: the worker asks for all of the rows


@dataclass(slots=True)
class _OfLife:
    """The requests of one life that are not answered, and those of them that it waits for."""

    open: list[Asked] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)


class RowsAgain:
    """Who waits for rows."""

    def __init__(self) -> None:
        self._of: dict[LifeKey, _OfLife] = {}

    def ask(self, run: Run, got: Asked) -> list[Reply]:
        """Keeps a request until its place in the record; answers one again that was answered before."""
        asked, own = got.message, self._of.setdefault((got.message.worker, got.message.incarnation), _OfLife())
        if replies := run.requests.pull_rows(got):
            return replies
        known = any(other.message.request == asked.request for other in own.open)
        if known or not asked.ahead:  # who asks for rows ahead of time again waits for them by now
            own.awaited.add(asked.request)
        if not known:
            own.open.append(got)
        return []

    def waits(self, key: LifeKey) -> bool:
        """Whether a life waits for rows, and does nothing else meanwhile."""
        return bool(self._of.get(key, _OfLife()).awaited)

    def give(self, run: Run, item: GaveRows, replies: list[Reply], *, is_first: bool) -> bool:
        """The record has an answer here; returns whether it was given: the worker has asked.

        Args:
            run: What is asked for.
            item: What the record has.
            replies: Get the answer.
            is_first: Whether this is shard 0, whose part of the keys the record knows.

        Raises:
            TorchQuorumError: The worker asks for something else.
        """
        own = self._of.setdefault((item.worker, item.incarnation), _OfLife())
        wanted = item.track, item.table, item.ahead, item.changed
        for got in own.open:
            asked = got.message
            if (asked.track, asked.table, asked.ahead, asked.since >= 0) == wanted:
                if is_first and zlib.crc32(run.shard.row_requests.keys_of(asked)) != item.keys:
                    raise TorchQuorumError(_otherwise(run, item, "asks for other rows"))
                self._close(own, got)
                entry = m.RowsOut(item.worker, item.incarnation, asked.request)
                replies += run.shard.row_requests.answer(entry, [track.version for track in run.shard.tracks])
                return True
            if (asked.track, asked.table) == wanted[:2] and not item.ahead and asked.request in own.awaited:
                # What was asked for ahead of time had gone with a lost connection: then all of it was asked for.
                self._close(own, got)
                replies.append(got.reply(m.Rows(asked.request, NOT_KNOWN)))
                return False
        if own.awaited:
            raise TorchQuorumError(_otherwise(run, item, "asks for rows of another table"))
        return False

    def lose(self, text: str) -> list[Reply]:
        """The variables are lost here: whoever waits hears it."""
        found = [
            got.reply(m.Fault(LostPlaceError.__name__, text, got.message.request))
            for own in self._of.values()
            for got in own.open
            if got.message.request in own.awaited
        ]
        self._of.clear()
        return found

    def _close(self, own: _OfLife, got: Asked) -> None:
        own.open.remove(got)
        own.awaited.discard(got.message.request)


def _otherwise(run: Run, item: GaveRows, what: str) -> str:
    table = run.shard.tracks[item.track].plan.tables[item.table].name
    return (
        f"/job:worker/task:{item.worker} {what}, where in the record it asks for some of {table}: its program does not do the same "
        "again. Does it decide by time, or by what is not recorded?"
    )
