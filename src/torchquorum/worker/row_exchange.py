"""What goes between a worker and the shards of its tables: rows in, gradients of rows out.

Owned by the worker's thread, with its part in the run. What always holds: the rows of a pull are those of one place of the log, on all
ps tasks; a gradient names each key once, and every ps task gets those that are there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import torch

import torchquorum.wire.messages as m
from torchquorum.memory.key_index import Keys
from torchquorum.memory.shared_pool import SharedPool, rows_behind
from torchquorum.update.gradient_norm import norm_of
from torchquorum.update.table_keys import shard_of
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import cut_parts, frame_tensor, pack_parts, parts_bytes, write_parts
from torchquorum.wire.key_frames import pack_keys
from torchquorum.wire.rpc import error_of
from torchquorum.worker.ps_channels import PsChannels
from torchquorum.worker.row_reading import KeptRows
from torchquorum.worker.row_tables import RowTables
from torchquorum.worker.row_transfer import on_host

PushedRows = list[tuple[list[m.RowPart], list[torch.Tensor]]]
POOL_BYTES = 256 << 20  # of address space; what does not fit travels in frames
AHEAD = 2  # as many as a ps keeps of each table


@dataclass
class RowPull:
    """A request for rows: what goes to each ps task, and what has come back."""

    messages: list[m.PullRows]
    keys: Keys
    places: list[np.ndarray]  # of the keys of each ps task
    frames: list[list[Frame]]
    pools: list[SharedPool | None]  # where a ps task finds the keys and puts the rows; none where they travel
    found: dict[int, tuple[m.Rows, list[Frame]]] = field(default_factory=dict)
    rows: torch.Tensor | None = None
    version: int = -1

    @property
    def number(self) -> int:
        """Returns the number of the request, the same at all ps tasks."""
        return self.messages[0].request

    @property
    def table(self) -> int:
        """Returns which table it is about."""
        return self.messages[0].table


class RowExchange:
    """Pulls and pushes rows.

    Args:
        tables: The worker's tables.
        channels: The channels to the ps tasks.
        shared: Of each ps task, whether memory is shared with it.
        track: Which optimizer's tables they are.
        version: Returns the version of that optimizer which this worker last took.

    Attributes:
        norm: That of the gradients that were collected last.
        kept: The rows that are kept of each table, where that was asked for.

    Raises:
        SegmentError: No shared memory can be had.
    """

    def __init__(
        self,
        tables: RowTables,
        channels: PsChannels,
        shared: Sequence[bool],
        track: int = 0,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        self._tables, self._channels, self._specs = tables, channels, tables.specs
        self._num_shards, self._track, self._version = len(channels), track, version
        self.norm = 0.0
        self._ahead: dict[int, deque[RowPull]] = {}
        self.pools: list[SharedPool | None] = [None] * len(shared)
        self._pushed: deque[list[tuple[SharedPool, int]]] = deque()
        try:
            for k, is_shared in enumerate(shared):
                self.pools[k] = SharedPool("rows", POOL_BYTES) if is_shared else None
        except BaseException:
            self.close()
            raise
        keep = tables.reading.keep
        self.kept = [KeptRows(spec, keep) for spec in tables.specs] if keep else []
        tables.pull, tables.evicted, tables.prefetch = self.pull, self.evicted, self.prefetch
        channels.takes_rows.append(self._takes)

    def close(self) -> None:
        """Gives the memory up."""
        for pool in self.pools:
            if pool is not None:
                pool.close()

    def pull(self, table: int, keys: Keys) -> torch.Tensor:
        """Returns rows by their keys, each once and in order, as they are at one place of the log, or as old as was asked for."""
        if (rows := self._from_ahead(table, keys)) is not None:
            return rows
        if not self.kept:
            return self._pull(table, keys)[0]
        kept = self.kept[table]
        where = kept.find(keys, self._version() - self._tables.reading.max_staleness)
        missing = np.flatnonzero(where < 0)
        there = np.flatnonzero(where >= 0)
        rows = torch.empty((len(keys), self._specs[table].dim), dtype=getattr(torch, self._specs[table].dtype))
        rows[torch.from_numpy(there)] = kept.take(where[there])
        if len(missing):
            pulled, version = self._pull(table, keys[missing])
            kept.put(keys[missing], pulled, version)
            rows[torch.from_numpy(missing)] = pulled
        return rows

    def _pull(self, table: int, keys: Keys) -> tuple[torch.Tensor, int]:
        """Returns rows, and the version that they are of."""
        while True:
            asked = self._begin(table, keys)
            if self._finish(asked):  # else a ps was restored between two answers
                assert asked.rows is not None
                return asked.rows, asked.version

    # -- ahead of time ------------------------------------------------------------------------------------------------

    def prefetch(self, table: int, keys: Keys) -> None:
        """Asks for the rows of a later batch, and goes on."""
        if self.kept:
            where = self.kept[table].find(keys, self._version() - self._tables.reading.max_staleness)
            keys = keys[where < 0]  # those that are kept are there already
        if len(keys):
            ahead = self._ahead.setdefault(table, deque(maxlen=AHEAD))
            ahead.append(self._begin(table, keys, ahead=True))

    def _from_ahead(self, table: int, keys: Keys) -> torch.Tensor | None:
        """Returns rows that were asked for ahead of time; None if they were not, or not all of them."""
        for asked in list(self._ahead.get(table, ())):
            exact = len(asked.keys) == len(keys) and np.array_equal(asked.keys, keys)
            places = None if exact else _places(asked.keys, keys)
            if not exact and (places is None or self.kept):
                continue
            if exact:
                self._drop(table, asked)
            if not self._is_good(table, asked):
                return None
            assert asked.rows is not None
            return asked.rows if places is None else asked.rows.index_select(0, torch.from_numpy(places))
        for asked in list(self._ahead.get(table, ())) if self.kept else ():
            # What was not kept of this batch was asked for: it is kept now, and read from there.
            if np.isin(asked.keys, keys).all():
                self._drop(table, asked)
                if self._finish(asked):
                    assert asked.rows is not None
                    self.kept[table].put(asked.keys, asked.rows, asked.version)
        return None

    def _drop(self, table: int, asked: RowPull) -> None:
        self._ahead[table] = deque((other for other in self._ahead[table] if other is not asked), maxlen=AHEAD)

    def _is_good(self, table: int, asked: RowPull) -> bool:
        """Whether rows that were asked for ahead of time can be used: those that are too old by now are fetched again."""
        if asked.rows is None and not self._finish(asked):
            return False
        bound = self._tables.reading.max_staleness
        if bound and self._version() - asked.version <= bound:
            return True
        again = self._begin(table, asked.keys, since=asked)
        return self._finish(again, since=asked)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _begin(self, table: int, keys: Keys, *, ahead: bool = False, since: RowPull | None = None) -> RowPull:
        """Asks every ps task for its part of some rows, or for what has changed of those that were asked for before."""
        channels, end = self._channels, self._channels.end
        message = m.PullRows(end.index, end.incarnation, channels.next_number(), table, self._track, ahead)
        messages = [msgspec.structs.replace(message) for _ in range(self._num_shards)]
        pools: list[SharedPool | None] = [None] * self._num_shards
        if since is not None:
            places = since.places
            frames: list[list[Frame]] = [[] for _ in places]
            for each in messages:
                each.since = since.number
        else:
            shards = shard_of(keys, self._num_shards)
            places = [np.flatnonzero(shards == k) for k in range(self._num_shards)]
            packed = [keys] if self._num_shards == 1 else [keys[those] for those in places]
            frames = [[] for _ in packed]
            for k, own in enumerate(packed):
                messages[k].count = len(own)
                if self._in_pool(messages[k], k, own):
                    pools[k] = self.pools[k]
                else:
                    frames[k] = [pack_keys(own)]
        for k in range(self._num_shards):
            channels.post(k, messages[k], frames[k])
        return RowPull(messages, keys, places, frames, pools)

    def _in_pool(self, message: m.PullRows, k: int, keys: Keys) -> bool:
        """Puts keys where ps task k finds them, with room for their rows; False if there is none: they travel.

        The room is given back with the rows. That of a request without an answer never is: the ps may still write there.
        """
        pool, spec = self.pools[k], self._specs[message.table]
        if pool is None:
            return False
        row_bytes = spec.dim * getattr(torch, spec.dtype).itemsize
        begin, size_bytes = rows_behind(0, len(keys), row_bytes)
        at = pool.take(begin + size_bytes)
        if at is None:
            return False
        message.at = at
        pool.bytes(at, 8 * len(keys)).view(torch.int64).copy_(torch.from_numpy(keys))
        return True

    def _finish(self, asked: RowPull, since: RowPull | None = None) -> bool:
        """Waits for the answers to a request; False if they are not of one version, or a ps task does not know what `since` was.

        The rows are then in the request, those of a change in the one that it is about.
        """
        channels, found, number = self._channels, asked.found, asked.number
        what = f"rows of {self._specs[asked.table].name}"
        limit_s = channels.end.patience.round_s

        def ask_again(awaited: int) -> None:
            """Asks those that owe an answer; one that is gone, or has lost its variables, keeps the others from answering."""
            for k in range(self._num_shards):
                if k not in found:
                    channels.asker(k).check(0.0, 0.0, limit_s, what)
                    if k != awaited:
                        self._take(k, asked)
                    channels.post(k, asked.messages[k], asked.frames[k])

        for k in range(self._num_shards):
            if k not in found:
                found[k] = channels.asker(k).wait(
                    m.Rows,
                    lambda rows: rows.request == number,
                    what=what,
                    limit_s=limit_s,
                    repeat=partial(ask_again, k),
                    number=number,
                )
        versions = {answer.version for answer, _ in found.values()}
        if len(versions) > 1 or versions == {-1}:
            return False
        target = asked if since is None else since
        target.version = versions.pop()
        if since is None:
            asked.rows = self._joined(asked)
        else:
            self._change(since, found)
        return True

    def _joined(self, asked: RowPull) -> torch.Tensor:
        """Returns the rows of all ps tasks, in the order of the keys."""
        spec = self._specs[asked.table]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        parts = list[torch.Tensor]()
        for k, mine in enumerate(asked.places):
            size_bytes, pool, message = len(mine) * spec.dim * dtype.itemsize, asked.pools[k], asked.messages[k]
            if pool is not None:
                begin, _ = rows_behind(message.at, len(mine), spec.dim * dtype.itemsize)
                memory = pool.lend(message.at, begin, size_bytes)
            else:
                memory = frame_tensor(asked.found[k][1][0], size_bytes)
            # No rows at all may come with strides that cannot be viewed.
            parts.append(
                memory.view(dtype).view(-1, spec.dim) if size_bytes else torch.empty((0, spec.dim), dtype=dtype)
            )
        if len(parts) == 1:
            return parts[0]
        rows = torch.empty((len(asked.keys), spec.dim), dtype=dtype)
        for mine, values in zip(asked.places, parts, strict=True):
            rows[torch.from_numpy(mine)] = values
        return rows

    def _change(self, asked: RowPull, found: dict[int, tuple[m.Rows, list[Frame]]]) -> None:
        """Takes what has changed of rows."""
        spec = self._specs[asked.table]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        assert asked.rows is not None
        if any(answer.changed for answer, _ in found.values()):
            asked.rows = asked.rows.clone()  # it lies in a frame, or was handed out
        for k, mine in enumerate(asked.places):
            answer, frames = found[k]
            if answer.changed > 0:
                sizes = [answer.changed * 8, answer.changed * spec.dim * dtype.itemsize]
                places, rows = cut_parts(frames[0], sizes)
                where = torch.from_numpy(mine[places.view(torch.int64).numpy()])
                asked.rows.index_copy_(0, where, rows.view(dtype).view(-1, spec.dim))

    def _takes(self, k: int, message: m.Message, frames: list[Frame]) -> bool:
        """Takes rows that were asked for ahead of time, and arrive while something else is awaited."""
        number = getattr(message, "request", -1)
        for requests in self._ahead.values():
            for asked in requests:
                if asked.number == number and isinstance(message, m.Rows):
                    asked.found[k] = message, frames
                    return True
        return False

    def _take(self, k: int, asked: RowPull) -> None:
        """Takes what a ps task has sent while another was waited for."""
        number = asked.number
        while (arrived := self._channels.arrive(k, 0.0)) is not None:
            message, frames = arrived
            if isinstance(message, m.Rows) and message.request == number:
                asked.found[k] = message, frames
            elif isinstance(message, m.Fault) and message.request in (-1, number):
                raise error_of(message)
            else:
                self._channels.route(k, message, frames)

    def evicted(self, table: int) -> Keys:
        """Returns the keys of a table that went last, of all ps tasks."""
        end, found = self._channels.end, list[Keys]()
        for k in range(self._num_shards):
            number = self._channels.next_number()
            _, frames = self._channels.asker(k).ask(
                m.TakeEvicted(end.index, end.incarnation, number, table, self._track),
                kind=m.Evicted,
                what="the keys that went last",
                limit_s=end.patience.round_s,
                accept=lambda answer, number=number: answer.request == number,
            )
            found.append(frame_tensor(frames[0], len(frames[0])).view(torch.int64).numpy())
        return np.concatenate(found)

    def attach(self, k: int, rows: PushedRows, push: m.Push) -> list[Frame]:
        """Says in a push to ps task k which rows go with it; returns the frame with them, if it is not in the worker's memory.

        That memory is used again by the next push but one: the ps has copied it, or used it, before it answered.
        """
        parts, tensors = rows[k]
        push.rows, pool = parts, self.pools[k]
        if not parts:
            return []
        size_bytes = parts_bytes([tensor.numel() * tensor.element_size() for tensor in tensors])
        at = pool.take(size_bytes) if pool is not None else None
        if pool is None or at is None:
            return [_packed(parts, tensors)]
        self._pushed[-1].append((pool, at))
        write_parts(tensors, pool.bytes(at, size_bytes))
        push.rows_at = at
        return []

    def collect(self) -> PushedRows:
        """Returns, for each ps task, the gradients of rows that have gathered, to go with a push."""
        self._pushed.append([])
        while len(self._pushed) > 2:
            for pool, at in self._pushed.popleft():
                pool.give(at)
        found: PushedRows = [([], []) for _ in range(self._num_shards)]
        norms = list[float]()
        taken = [(number, each.take_gradient()) for number, each in enumerate(self._tables.all)]
        given = [(number, *found) for number, found in taken if found is not None]
        every = on_host([rows for _, _, rows, _ in given], [early for *_, early in given])
        for (number, keys, *_), rows in zip(given, every, strict=True):
            norms.append(norm_of([rows]))
            shards = shard_of(keys, self._num_shards)
            for k, (parts, tensors) in enumerate(found):
                mine = np.flatnonzero(shards == k) if self._num_shards > 1 else slice(None)
                own = np.ascontiguousarray(keys[mine])
                values = rows[torch.from_numpy(mine)] if isinstance(mine, np.ndarray) else rows
                parts.append(m.RowPart(number, len(own)))
                tensors += [torch.from_numpy(own), values]
        self.norm = math.hypot(*norms)
        return found


def _packed(parts: list[m.RowPart], tensors: list[torch.Tensor]) -> Frame:
    """Returns keys and rows as a frame; says in the parts how many bytes the keys of each take."""
    found = list[torch.Tensor]()
    for part, keys, rows in zip(parts, tensors[::2], tensors[1::2], strict=True):
        packed = pack_keys(keys.numpy())
        part.packed = len(packed)
        found += [frame_tensor(packed, len(packed)), rows]
    return pack_parts(found)


def _places(there: Keys, keys: Keys) -> np.ndarray | None:
    """Returns the places of keys among others, both in order; None if some are not there."""
    places = np.searchsorted(there, keys)
    inside = len(there) > 0 and (not len(places) or int(places[-1]) < len(there))
    return places if inside and np.array_equal(there[places], keys) else None
