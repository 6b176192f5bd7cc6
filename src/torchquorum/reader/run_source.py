"""A run that is read from its ps tasks: takes what has changed into a replica, by message or from shared memory.

Owned by a reader, used under its lock. What always holds: a replica that is handed out is of one version on all shards; a ps task that is
lost, and one that has come back, is told to people; versions go back only with a new generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import torchquorum.wire.messages as m
from torchquorum.clock import Clock
from torchquorum.cluster.secret import Access
from torchquorum.errors import ConfigError
from torchquorum.memory.key_index import Keys
from torchquorum.reader.flat_replica import FlatReplica
from torchquorum.reader.freshness import Freshness
from torchquorum.reader.ps_connections import PsConnections, Who
from torchquorum.reader.read_copy import ReadCopy
from torchquorum.reader.shared_versions import SharedVersions
from torchquorum.reader.source import AwayError, WantedParts
from torchquorum.update.table_keys import shard_of
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import cut_parts, pack_parts
from torchquorum.wire.reader_messages import SHARED_MEMORY

BEAT_S = 1.0
BUFFERS_S = 1.0
ANSWER_S = 3.0  # of a question; more than ps task 0 waits for buffers
GREETING_S = 2.0


class RunSource:
    """Reads from ps tasks.

    Args:
        address: Of ps task 0, or of another one.
        access: The secret, if the cluster has one.
        who: Who reads.
        compress: The compressor of differences; empty for whole tensors.
        clock: Tells the time.

    Attributes:
        replica: What was taken.
        freshness: How old that was.
        over: Whether the run makes no more versions.
        way: How versions come: `shared memory` or `messages`.
    """

    def __init__(self, address: str, access: Access, who: Who, compress: str, clock: Clock) -> None:
        self._who, self._compress, self._clock = who, compress, clock
        self._connections = PsConnections(address, access, who, clock)
        self._connections.hear = self._hear
        self.replica, self.freshness = ReadCopy(), Freshness(clock)
        self.over, self._averages, self.way = False, False, "messages"
        self._plan: m.Plan | None = None
        self._generation = 0
        self._flat: FlatReplica | None = None
        self._shared: SharedVersions | None = None
        self._beat_at = self._buffers_at = -1e9
        self._buffers = -1

    @property
    def where(self) -> str:
        """Returns whom it reads from, for lines."""
        return self._connections.first

    @property
    def received_bytes(self) -> int:
        """Returns how many bytes have come by message."""
        return self._connections.received_bytes

    # -- versions -----------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Returns the creation of the variables that was met last."""
        return self._generation

    def take(self, wanted: WantedParts) -> None:
        """Takes the newest version.

        Raises:
            AwayError: The run cannot be read now; what is here stays.
            TorchQuorumError: It cannot be read at all.
        """
        self._connections.drain()
        if self._plan is None or (self._shared is not None and self._shared.is_given_up and not self.over):
            self._meet()
        self._beat()
        replica, flat = self.replica, self._flat
        assert flat is not None and self._plan is not None
        unknown = wanted.tables - replica.specs.keys()
        if unknown:
            known = ", ".join(sorted(replica.specs)) or "none"
            raise ConfigError(f"the run has no table {', '.join(sorted(unknown))}; it has {known}")
        shares = self._can_share(wanted)
        only_asks = bool(wanted.averages or self._averages or wanted.tables or replica.tables)
        self.way = SHARED_MEMORY if self._shared is not None and not only_asks else "messages"
        if shares:
            self._take_shared(flat)
        else:
            self._take_asked(flat, wanted)

    def _meet(self) -> None:
        welcomes = self._connections.meet(GREETING_S)
        plan = welcomes[0].plan
        assert plan is not None
        self.over = False
        self._plan, self._generation = plan, welcomes[0].generation
        replica = self.replica
        replica.restart()
        replica.names = plan.names
        replica.tied = plan.tied
        replica.specs = {
            table.name: (track, number, table)
            for track, of in enumerate(plan.tracks())
            for number, table in enumerate(of.tables)
        }
        self._flat = FlatReplica(plan, replica)
        self._buffers, self._buffers_at = -1, -1e9
        self._shared = SharedVersions.opened(plan, welcomes) if self._who.shares_memory else None

    def lost(self) -> None:
        """The run could not be read: it is greeted anew."""
        self._plan = None

    def _can_share(self, wanted: WantedParts) -> bool:
        """Whether all that is wanted is in shared memory; constants, averages, buffers and rows come by message."""
        assert self._plan is not None
        if (
            self._shared is None
            or not self.replica.complete
            or wanted.averages
            or self._averages
            or wanted.tables
            or self.replica.tables
        ):
            return False
        if not self._connections.is_connected and not self.over:
            raise AwayError(f"{self.where} does not answer")
        return not self._plan.buffers or self._clock.now() - self._buffers_at < BUFFERS_S

    def _take_shared(self, flat: FlatReplica) -> None:
        assert self._shared is not None
        replica = self.replica
        if self._shared.newest() == replica.versions:
            return
        copied = self._shared.copy(flat.values, replica.versions)
        if copied is None:  # versions come too fast to be copied: what is in the memory now is of none
            flat.forget()
            self._take_asked(flat, WantedParts())
            return
        versions, age_s = copied
        for track, (version, before) in enumerate(zip(versions, replica.versions, strict=True)):
            if version != before:
                flat.changed(track)
        flat.set_all(versions)
        self._taken(flat, age_s)

    def _take_asked(self, flat: FlatReplica, wanted: WantedParts) -> None:
        """Asks until all shards have sent all rows, and with the last of them the variables, at one place of the log."""
        plan, replica = self._plan, self.replica
        assert plan is not None
        replica.keep(wanted.tables)
        self._averages = self._averages or wanted.averages
        if self._averages and not flat.has_averages:
            flat.forget()
        if not replica.complete and not replica.is_empty and not wanted.since:
            flat.forget()
        if self._may_begin_at(wanted, flat):
            flat.begin_at(wanted.since)
        partial = flat.is_partial and not replica.complete and bool(wanted.since)
        cursors = _Cursors(plan, replica.tables, flat)
        while True:
            tracks = len(plan.rules)
            answers = self._connections.ask(
                lambda k, number: (self._question(k, number, flat, wanted, cursors), ()),
                lambda got, number: isinstance(got, m.VersionRead) and got.request == number,
                tracks,
                ANSWER_S,
            )
            every = [[message for message, _ in each] for each in answers]
            if {message.generation for each in every for message in each} != {self._generation}:
                raise AwayError(f"{self.where}: the variables are another creation")
            for k, each in enumerate(answers):
                for message, frames in each:
                    self._accept(k, flat, message, frames, cursors)
            if cursors.are_done:
                break
            cursors.go_on()
        replica.complete = not partial or all(message.full for each in every for message in each)
        if plan.buffers:
            self._buffers_at = self._clock.now()
        self.over = self.over or any(message.over for message in every[0])
        versions = flat.common_versions()
        if versions is None:
            raise AwayError(f"{self.where}: the shards answered at different versions")
        if versions != replica.versions or flat.has_news:
            self._taken(flat, max(message.age_s for each in every for message in each))

    def _may_begin_at(self, wanted: WantedParts, flat: FlatReplica) -> bool:
        """Whether nothing is here, and only what has changed since a version of this generation is wanted."""
        assert self._plan is not None
        fits = wanted.generation in (0, self._generation) and len(wanted.since) == len(self._plan.rules)
        return fits and self.replica.is_empty and not flat.has_begun

    def _question(self, k: int, number: int, flat: FlatReplica, wanted: WantedParts, cursors: _Cursors) -> m.Read:
        assert self._plan is not None
        buffers = self._buffers if k == 0 and self._plan.buffers and self._plan.buffers_mode != "local" else -2
        return m.Read(
            self._who.number,
            number,
            self._generation,
            flat.versions_on(k),
            dense=not cursors.continues,
            averages=self._averages,
            buffers=buffers,
            compress=self._compress,
            references=flat.references_on(k),
            tables=cursors.on(k),
        )

    def _accept(self, k: int, flat: FlatReplica, got: m.VersionRead, frames: list[Frame], cursors: _Cursors) -> None:
        """Takes a shard's answer of one optimizer."""
        left = iter(frames)
        if got.kind == "whole":
            flat.put_whole(got.track, k, next(left))
        elif got.kind == "some":
            flat.put_some(got.track, k, next(left), frozenset(got.variables))
        elif got.kind == "difference":
            flat.add_difference(got.track, k, next(left), self._compress)
        if got.kind not in ("rows",):
            flat.set_version(got.track, k, got.version, got.reference)
        if got.constants:
            flat.put_constants(got.track, k, next(left))
        if got.averages:
            flat.put_averages(got.track, k, next(left))
        if got.buffers >= 0:
            flat.put_buffers(next(left))
            self._buffers = got.buffers
        if got.rows:
            cursors.take(k, got, self.replica, next(left))

    def _taken(self, flat: FlatReplica, age_s: float) -> None:
        flat.assemble()
        self.replica.taken(flat.common_versions() or [], self._generation)
        self.freshness.took(age_s)
        if self.over:
            self.freshness.stop()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def rows(self, asked: dict[str, Keys]) -> tuple[dict[str, torch.Tensor], list[int], float]:
        """Returns rows of tables, all of one version, with that version and how old it is.

        Raises:
            AwayError: The run cannot be read now.
            ConfigError: There is no such table.
        """
        if self._plan is None:
            self._meet()
        self._beat()
        plan, specs = self._plan, self.replica.specs
        assert plan is not None
        for name in asked:
            if name not in specs:
                raise ConfigError(f"the run has no table {name}; it has {', '.join(sorted(specs)) or 'none'}")
        places = {name: shard_of(keys, plan.num_shards) for name, keys in asked.items()}

        def make(k: int, number: int) -> tuple[m.Message, Sequence[Frame]]:
            mine = {name: keys[places[name] == k] for name, keys in asked.items()}
            tables = [(*specs[name][:2], len(keys)) for name, keys in mine.items()]
            frame = pack_parts([torch.from_numpy(np.ascontiguousarray(keys)) for keys in mine.values()])
            return m.ReadRows(self._who.number, number, tables), [frame]

        answers = self._connections.ask(
            make, lambda got, number: isinstance(got, m.RowsRead) and got.request == number, 1, ANSWER_S
        )
        heads = [each[0][0] for each in answers]
        if {head.generation for head in heads} != {self._generation}:
            raise AwayError(f"{self.where}: the variables are another creation")
        found: dict[str, torch.Tensor] = {}
        for name, keys in asked.items():
            spec = specs[name][2]
            found[name] = torch.empty((len(keys), spec.dim), dtype=getattr(torch, spec.dtype))
        for k, each in enumerate(answers):
            counts = [int(np.count_nonzero(places[name] == k)) for name in asked]
            sizes = [
                n * found[name].shape[1] * found[name].element_size() for n, name in zip(counts, asked, strict=True)
            ]
            for name, part, count in zip(asked, cut_parts(each[0][1][0], sizes), counts, strict=True):
                where = torch.from_numpy(np.flatnonzero(places[name] == k))
                found[name][where] = part.view(found[name].dtype).view(count, found[name].shape[1])
        return found, heads[0].versions, max(head.age_s for head in heads)

    # -- ps task 0 ----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Says every second what it has."""
        now = self._clock.now()
        if now - self._beat_at < BEAT_S:
            return
        self._beat_at = now
        self._connections.tell_first(self._state())

    def _state(self, *, leaves: bool = False) -> m.ReaderBeat:
        return m.ReaderBeat(
            self._who.number,
            self._who.name,
            self._generation,
            self.replica.versions,
            self.freshness.ages(),
            self.way,
            self.received_bytes,
            leaves,
        )

    def _hear(self, message: Any) -> None:
        if isinstance(message, m.ReaderAlive):
            if message.generation != self._generation:
                self._plan = None  # other variables: everything is taken anew
            elif message.over and not self.over:
                self.over = True
                self._beat_at = -1e9

    def close(self) -> None:
        """Says that it reads no more, and closes the connections."""
        self._connections.tell_first(self._state(leaves=True))
        self._connections.close()


class _Cursors:
    """Which rows are still to come, from each shard.

    Where not all come in one answer, they are read by position while the tables change; then what has changed since the first of these
    answers is asked for, until that comes in one answer: it is of one place of the log.
    """

    def __init__(self, plan: m.Plan, tables: Any, flat: FlatReplica) -> None:
        self._num_shards = plan.num_shards
        self._tables = {
            (track, number): spec.name
            for track, of in enumerate(plan.tracks())
            for number, spec in enumerate(of.tables)
            if spec.name in tables
        }
        self._flat = flat
        self._start: dict[tuple[int, int, int], int] = {}
        self._since: dict[tuple[int, int, int], int] = {}
        self._first: dict[tuple[int, int, int], int] = {}
        self._next: dict[tuple[int, int, int], int] = {}
        self.continues = False

    def on(self, k: int) -> list[m.TableCursor]:
        """Returns what is asked of a shard."""
        found = []
        for track, number in self._tables:
            place = (k, track, number)
            if self.continues and self._start.get(place, 0) < 0:
                continue  # all of it has come
            since = self._since.get(place, self._flat.table_version(place))
            found.append(m.TableCursor(track, number, since, max(0, self._start.get(place, 0))))
        return found

    def take(self, k: int, got: m.VersionRead, replica: ReadCopy, frame: Frame) -> None:
        """Takes the rows of an answer."""
        sizes: list[int] = []
        for part in got.rows:
            spec = replica.specs[self._tables[got.track, part.table]][2]
            item = getattr(torch, spec.dtype).itemsize
            sizes += [8 * part.gone, 8 * part.changed, part.changed * spec.dim * item]
        pieces = cut_parts(frame, sizes)
        for n, part in enumerate(got.rows):
            place, name = (k, got.track, part.table), self._tables[got.track, part.table]
            spec = replica.specs[name][2]
            gone, keys, rows = pieces[3 * n : 3 * n + 3]
            values = rows.view(getattr(torch, spec.dtype)).view(part.changed, spec.dim)
            gone_keys, changed = gone.view(torch.int64).numpy(), keys.view(torch.int64).numpy()
            whole = part.whole and self._num_shards == 1
            if part.whole and not whole:  # only what is of this shard goes
                gone_keys = self._of_shard(replica, name, k, changed)
            if whole or len(gone_keys) or len(changed):
                replica.change_rows(name, changed.copy(), values, gone_keys.copy(), whole=whole)
                self._flat.has_news = True
            self._first.setdefault(place, got.version)
            self._next[place] = part.next
            if part.next < 0:
                self._flat.set_table_version(place, self._first[place] if self._start.get(place, 0) else got.version)

    def _of_shard(self, replica: ReadCopy, name: str, k: int, besides: Keys) -> Keys:
        part = replica.tables[name]
        if not part.keys.grows:
            return np.empty(0, np.int64)
        keys = part.keys.at(np.flatnonzero(part.keys.live_mask()))
        mine = keys[shard_of(keys, self._num_shards) == k]
        return mine[~np.isin(mine, besides)]

    @property
    def are_done(self) -> bool:
        """Whether all rows have come in this answer."""
        return not self.continues and all(at < 0 for at in self._next.values())

    def go_on(self) -> None:
        """Goes on where the last answers ended, or from the beginning with what has changed meanwhile."""
        if all(at < 0 for at in self._next.values()):
            for place in self._next:
                self._flat.set_table_version(place, self._first[place])
            self._start, self._since, self._first, self._next, self.continues = {}, {}, {}, {}, False
            return
        self._since = {place: self._since.get(place, self._flat.table_version(place)) for place in self._next}
        self._start, self.continues = dict(self._next), True
