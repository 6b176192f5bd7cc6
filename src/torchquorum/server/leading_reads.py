"""What readers ask of shard 0: it says at which place of the log all shards answer, has the run's buffers, and knows how fresh readers are.

Owned by `Leading`. What always holds: a reader's question costs workers nothing but, for a model with buffers and at most once a second,
the question for these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torchquorum.wire.messages as m
from torchquorum.server.buffer_home import BufferHome
from torchquorum.server.leader import Leader
from torchquorum.server.reads import MOST_READERS, OpenRead, Reads
from torchquorum.server.reply import Incoming, Reply
from torchquorum.server.shard import Shard
from torchquorum.wire.codec import Frame
from torchquorum.wire.reader_messages import SHARED_MEMORY

BUFFERS_EVERY_S = 1.0
BUFFERS_WAIT_S = 2.0
MOST_LISTED = 20
OVER_S = 2.0  # how long the last version is kept for readers that ask now and then
RECENT_S = 3.0


@dataclass(slots=True)
class ReaderState:
    """What a reader has said of itself."""

    beat: m.ReaderBeat
    heard_at: float
    has_left: bool = False

    def describe(self) -> dict[str, Any]:
        """Returns it for people and reports."""
        beat = self.beat
        ages = {"age_p50_s": beat.ages.p50, "age_p99_s": beat.ages.p99} if beat.ages is not None else {}
        return {
            "name": beat.name[:80],
            "state": "left" if self.has_left else "reading",
            "versions": beat.versions[:8],
            "way": beat.way[:20],
            "received_bytes": beat.received_bytes,
            **ages,
        }


class LeadingReads(Reads):
    """The questions of readers on shard 0.

    Args:
        shard: What is read.
        leader: Keeps the log.
        buffers: The model's buffers, if it has any.
    """

    def __init__(self, shard: Shard, leader: Leader, buffers: BufferHome | None) -> None:
        super().__init__(shard)
        self._leader, self._home = leader, buffers
        self._told: dict[int, tuple[int, set[int]]] = {}
        self._states: dict[int, ReaderState] = {}
        self._told_over: set[int] = set()
        self._most_at_once = 0

    def told(self, shard: int, reader: int, request: int) -> None:
        """A shard knows what a reader asks it for; when all do, they answer at one place of the log."""
        known = self._told.get(reader)
        if known is None or known[0] < request:
            known = self._told[reader] = (request, set())
        if known[0] == request and len(known[1]) < self.shard.plan.num_shards:
            known[1].add(shard)
            if len(known[1]) == self.shard.plan.num_shards:
                self._leader.log.append(m.ReadOut(reader, request))

    def beat(self, got: Incoming[m.ReaderBeat]) -> list[Reply]:
        """A reader says what it has."""
        beat, over = got.message, self._is_over()
        if not beat.leaves:
            self.hear(beat.reader, got.peer, got.now)
        self._states.pop(beat.reader, None)  # the order is that of the last words
        self._states[beat.reader] = ReaderState(beat, got.now)
        while len(self._states) > MOST_READERS:
            del self._states[next(iter(self._states))]
        if beat.leaves:
            self.leave(beat.reader)
            return []
        here = [track.version for track in self.shard.tracks]
        if over and (beat.way == SHARED_MEMORY or (beat.generation == self._generation and beat.versions == here)):
            self._told_over.add(beat.reader)  # it has the last version, or can take it without this task
        self._most_at_once = max(self._most_at_once, sum(not s.has_left for s in self._states.values()))
        return [got.reply(m.ReaderAlive(self._generation, over))]

    def leave(self, number: int) -> None:
        """A reader says that it reads no more, or has not been heard of."""
        super().leave(number)
        self._told.pop(number, None)
        if number in self._states:
            self._states[number].has_left = True

    def ask(self, got: Incoming[m.Read] | Incoming[m.ReadRows]) -> list[Reply]:
        """A reader asks."""
        replies = super().ask(got)
        if self._is_over() and isinstance(got.message, m.Read):
            self._told_over.add(got.message.reader)  # with the answer
        return replies

    def say_over(self) -> list[Reply]:
        """The run has ended: returns what tells every reader, so that those that follow take the last version now."""
        return [Reply(known.peer, m.ReaderAlive(self._generation, True)) for known in self.known.values()]

    def owing(self, now: float) -> bool:
        """Whether a reader that asks now and then has yet to take the last version."""
        return any(n not in self._told_over and now - k.heard_at < RECENT_S for n, k in self.known.items())

    def status(self) -> dict[str, Any]:
        """Returns who reads or has read, and how old what they had was, for people and reports; nothing without a reader."""
        if not self._states:
            return {}
        newest = sorted(self._states.values(), key=lambda s: (s.has_left, -s.heard_at))
        listed = [s.describe() for s in newest[:MOST_LISTED]]
        ages = [s.beat.ages for s in newest if s.beat.ages is not None]
        worst = {"age_p50_s": max(a.p50 for a in ages), "age_p99_s": max(a.p99 for a in ages)} if ages else {}
        count = sum(not s.has_left for s in newest)
        return {"readers": {"count": count, "most": self._most_at_once, **worst, "each": listed}}

    def _is_over(self) -> bool:
        """Whether no more versions are made, and the last one is here."""
        quorum = self._leader.quorum
        here = all(of.version == track.version for of, track in zip(quorum.tracks, self.shard.tracks, strict=True))
        return (quorum.stopped and here) or super()._is_over()

    def _may_answer(self, read: OpenRead, now: float) -> bool:
        """Whether the buffers are new enough; if not, the workers are asked for theirs."""
        asked, home = read.got.message, self._home
        if home is None or not isinstance(asked, m.Read) or asked.buffers < -1:
            return True
        quorum = self._leader.quorum
        return (
            home.is_fresh(quorum.version, now, 0.0 if quorum.stopped else BUFFERS_EVERY_S)
            or now - read.since > BUFFERS_WAIT_S
        )

    def advance(self, now: float) -> list[Reply]:
        """Does what follows for the questions that are open; those that wait for buffers have these asked for."""
        replies = super().advance(now)
        if self._home is not None and any(not read.told for read in self._open.values()):
            replies += self._home.ask_for_readers(self._leader.quorum.version, now, self._leader.quorum.alive)
            replies += super().advance(now)
        return replies

    def _tell(self, reader: int, request: int) -> list[Reply]:
        self.told(0, reader, request)
        return []

    def _buffers(self, has: int) -> tuple[int, Frame] | None:
        if self._home is None or has < -1:
            return None
        number, values = self._home.for_readers
        return (number, values) if number != has else None
