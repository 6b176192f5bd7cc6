"""What those who only read a run ask a ps task for: the variables, averages and rows of one version, as far as they lack them.

Owned by the run; `LeadingReads` is shard 0's. No reader is a worker, and nothing waits for one. What always holds: with several ps tasks a
question is answered by all of them at one place of the log; a reader that has not taken its last answer is not given another; what readers
make a ps keep is bounded.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import torchquorum.wire.messages as m
from torchquorum.errors import ConfigError
from torchquorum.server.references import References
from torchquorum.server.reply import LEADER, Delivery, Incoming, Reply
from torchquorum.server.shard import Shard
from torchquorum.server.shard_track import ShardTrack
from torchquorum.server.version_images import VersionImage, chosen_bytes
from torchquorum.wire.channel import Peer
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import cut_parts, pack_parts, tensor_frame

MOST_READERS = 1000
FORGET_S = 60.0
FROZEN_S = 10.0  # without a byte that moves, though an answer is on its way
ROWS_BYTES = 4 << 20  # of rows in one answer


@dataclass(slots=True)
class OpenRead:
    """The newest question of a reader, until it is answered."""

    got: Incoming[m.Read] | Incoming[m.ReadRows]
    since: float
    told: bool = False  # shard 0 knows that it is here


@dataclass(slots=True)
class KnownReader:
    """A reader, as this task sees it."""

    peer: Peer
    heard_at: float
    deliveries: list[Delivery] = field(default_factory=list)
    moved: tuple[int, float] = (-1, 0.0)  # bytes of its connection, and when they last changed

    def is_being_served(self, peer: Peer) -> bool:
        """Whether an answer is on its way to it."""
        self.deliveries = [each for each in self.deliveries if each.is_under_way_to(each.peer)]
        return any(each.peer == peer for each in self.deliveries)


class Reads:
    """The questions of readers on one shard.

    Args:
        shard: What is read.

    Attributes:
        known: Who has asked lately, by their numbers.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard, self._generation = shard, shard.generation
        self.known: dict[int, KnownReader] = {}
        self._open: dict[int, OpenRead] = {}
        self._references = References(secrets.randbits)
        shard.read_out = self.read_out

    # -- questions ----------------------------------------------------------------------------------------------------

    def ask(self, got: Incoming[m.Read] | Incoming[m.ReadRows]) -> list[Reply]:
        """A reader asks; it is answered now, when all shards know, or not at all: then it asks again."""
        asked = got.message
        if isinstance(asked, m.ReadRows):
            self._check_rows(asked, got.frames)
        else:
            self._check(asked, got.frames)
        reader = self.hear(asked.reader, got.peer, got.now)
        if reader.is_being_served(got.peer):
            return []
        self._open[asked.reader] = OpenRead(got, got.now)
        return self.advance(got.now)

    def hear(self, number: int, peer: Peer, now: float) -> KnownReader:
        """Notes that a reader lives.

        Raises:
            ValueError: There are too many.
        """
        known = self.known.get(number)
        if known is None:
            if len(self.known) >= MOST_READERS:
                raise ConfigError(f"this run has {MOST_READERS} readers, which is as many as it can have")
            known = self.known[number] = KnownReader(peer, now)
        known.peer, known.heard_at = peer, now
        return known

    def leave(self, number: int) -> None:
        """A reader says that it reads no more."""
        self.known.pop(number, None)
        self._open.pop(number, None)

    def advance(self, now: float) -> list[Reply]:
        """Does what follows for the questions that are open."""
        replies: list[Reply] = []
        for number, read in [*self._open.items()]:
            if read.told or not self._may_answer(read, now):
                continue
            read.told = True
            if self.shard.plan.num_shards == 1:
                replies += self._answer(number)
            else:
                replies += self._tell(number, read.got.message.request)
        return replies

    def tick(self, now: float) -> list[Reply]:
        """Time has passed: who has not been heard of is forgotten."""
        for number, known in [*self.known.items()]:
            if now - known.heard_at > FORGET_S:
                self.leave(number)
        if not self.known:
            for track in self.shard.tracks:
                track.images.forget()
        return self.advance(now) if self._open else []

    def frozen(self, moved_bytes: Any, now: float) -> list[Peer]:
        """Returns the connections of readers that have taken nothing of an answer for too long."""
        found: list[Peer] = []
        for known in self.known.values():
            if not known.is_being_served(known.peer):
                known.moved = (-1, now)
                continue
            moved = moved_bytes(known.peer)
            if moved != known.moved[0]:
                known.moved = (moved, now)
            elif now - known.moved[1] > FROZEN_S:
                found.append(known.peer)
                known.moved = (-1, now)
        return found

    def read_out(self, entry: m.ReadOut) -> list[Reply]:
        """The log says that a question is answered now."""
        read = self._open.get(entry.reader)
        return self._answer(entry.reader) if read is not None and read.got.message.request == entry.request else []

    # -- what differs on shard 0 --------------------------------------------------------------------------------------

    def _may_answer(self, read: OpenRead, now: float) -> bool:
        return True

    def _tell(self, reader: int, request: int) -> list[Reply]:
        shard = self.shard
        return [Reply(LEADER, m.HaveRead(shard.index, reader, request, shard.followed, self._generation))]

    def _is_over(self) -> bool:
        return self.shard.ended is not None

    def _buffers(self, has: int) -> tuple[int, Frame] | None:
        """Returns the model's buffers with their number, if a reader that has others is to be sent them."""
        return None

    # -- answers ------------------------------------------------------------------------------------------------------

    def _check(self, asked: m.Read, frames: Sequence[Frame]) -> None:
        tracks = self.shard.tracks
        if frames:
            raise ValueError(f"{len(frames)} tensor frames, expected none")
        if asked.generation == self._generation and len(asked.since) != len(tracks):
            raise ValueError(f"versions of {len(asked.since)} optimizers, the run has {len(tracks)}")
        for cursor in asked.tables:
            known = 0 <= cursor.track < len(tracks) and 0 <= cursor.table < len(tracks[cursor.track].tables)
            if not known or cursor.start < 0:
                raise ValueError(f"table {cursor.table} of optimizer {cursor.track}, which is not there")
        if asked.averages and all(track.variables.averages is None for track in tracks):
            raise ConfigError(
                "no moving averages are kept; give tq.Optimizer an average=tq.ExponentialMovingAverage(0.99)"
            )
        if asked.compress:
            self._references.compressor(asked.compress)

    def _check_rows(self, asked: m.ReadRows, frames: Sequence[Frame]) -> None:
        if len(frames) != 1:
            raise ValueError(f"{len(frames)} frames of keys, expected 1")
        for (track, table, _), keys in zip(asked.tables, self._keys(asked, frames[0]), strict=True):
            if not 0 <= track < len(self.shard.tracks):
                raise ValueError(f"optimizer {track}: the run has {len(self.shard.tracks)}")
            self.shard.tracks[track].tables.check(table, keys)

    def _keys(self, asked: m.ReadRows, frame: Frame) -> list[Frame]:
        parts = cut_parts(frame, [8 * max(0, count) for _, _, count in asked.tables])
        return [tensor_frame(part) for part in parts]

    def _answer(self, number: int) -> list[Reply]:
        got, known = self._open.pop(number).got, self.known.get(number)
        asked = got.message
        rows = isinstance(asked, m.ReadRows)
        replies = [self._rows(got.peer, asked, got.frames[0])] if rows else self._version(got.peer, asked)
        for reply in replies:
            if reply.frames and known is not None:
                reply.delivery = reply.delivery or Delivery(reply.peer)
                known.deliveries.append(reply.delivery)
        return replies

    def _rows(self, peer: Peer, asked: m.ReadRows, frame: Frame) -> Reply:
        tracks, found = self.shard.tracks, list[torch.Tensor]()
        for (track, table, _), keys in zip(asked.tables, self._keys(asked, frame), strict=True):
            found.append(tracks[track].tables.gather(table, keys))
        newest = [track.images.newest for track in tracks]
        age_s = max(newest[track][1] for track, _, _ in asked.tables) if asked.tables else 0.0
        versions = [version for version, _ in newest]
        return Reply(peer, m.RowsRead(asked.request, self._generation, versions, age_s), [pack_parts(found)])

    def _version(self, peer: Peer, asked: m.Read) -> list[Reply]:
        same = asked.generation == self._generation
        replies: list[Reply] = []
        for track in self.shard.tracks:
            since = asked.since[track.index] if same else -1
            reply = self._of_track(peer, asked, track, since if since <= track.images.newest[0] else -1)
            if reply is None:
                return []  # too much is on its way to others: it asks again
            replies.append(reply)
        return replies

    def _of_track(self, peer: Peer, asked: m.Read, track: ShardTrack, since: int) -> Reply | None:
        version, age_s = track.images.newest
        answer = m.VersionRead(
            asked.request, self._generation, track.index, version, age_s, "same", over=self._is_over()
        )
        answer.full = since < 0
        cursors = [cursor for cursor in asked.tables if cursor.track == track.index]
        parts, rows = self._table_rows(track, cursors, version, same=asked.generation == self._generation)
        reply = Reply(peer, answer)
        if not asked.dense or any(part.next >= 0 for part in parts) or any(cursor.start for cursor in cursors):
            answer.kind = "rows"
        elif version != since:
            image = track.images.current(averages=asked.averages, exact=self.shard.plan.num_shards > 1)
            if image is None or image.version <= since:
                return None
            self._add_values(reply, asked, track, image, since)
        if track.index == 0 and (buffers := self._buffers(asked.buffers)) is not None:
            answer.buffers = buffers[0]
            reply.frames.append(buffers[1])
        answer.rows = parts
        if rows:
            reply.frames.append(pack_parts(rows))
        return reply

    def _add_values(self, reply: Reply, asked: m.Read, track: ShardTrack, image: VersionImage, since: int) -> None:
        answer = reply.message
        assert isinstance(answer, m.VersionRead)
        answer.kind, answer.version, values = "whole", image.version, image.values
        if since >= 0:
            made, chosen = None, track.images.changed_since(since)
            if asked.compress and track.index < len(asked.references):
                name, region = asked.references[track.index], track.region
                made = self._references.difference(name, track.index, image.version, values, region, asked.compress)
            if made is not None:
                answer.kind, (answer.reference, values) = "difference", made
            elif chosen is not None and not asked.compress:
                answer.kind, answer.variables = "some", sorted(chosen)
                values = chosen_bytes(track.region, image.values, chosen)
        if asked.compress and answer.kind == "whole":
            answer.reference = self._references.whole(track.index, image.version, image.values)
        reply.frames.append(values)
        if since < 0:
            answer.constants = True
            reply.frames.append(track.variables.constants)
        if asked.averages and image.averages is not None:
            answer.averages = True
            reply.frames.append(image.averages)
        reply.delivery = Delivery(reply.peer)
        image.deliveries.append(reply.delivery)

    def _table_rows(
        self, track: ShardTrack, cursors: Sequence[m.TableCursor], version: int, *, same: bool
    ) -> tuple[list[m.RowsPart], list[torch.Tensor]]:
        """Returns the rows that a reader lacks, and what they are."""
        parts, frames = list[m.RowsPart](), list[torch.Tensor]()
        for cursor in cursors:
            table = track.tables.tables[cursor.table]
            since, start = (cursor.since, cursor.start) if same and cursor.since <= version else (-1, 0)
            most = max(1, ROWS_BYTES // (8 + table.spec.dim * table.dtype.itemsize))
            gone = table.gone_since(since, version)
            if gone is None and since >= 0:  # too long ago: all rows
                since, start = -1, 0
            keys, rows, end = table.changed_since(since, start, most)
            gone = np.empty(0, np.int64) if gone is None or since < 0 or start else gone
            whole = since < 0 and start == 0
            parts.append(m.RowsPart(cursor.table, len(gone), len(keys), end, whole))
            frames += [torch.from_numpy(np.ascontiguousarray(gone)), torch.from_numpy(np.ascontiguousarray(keys)), rows]
        return parts, frames
