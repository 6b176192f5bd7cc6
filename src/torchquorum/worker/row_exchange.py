"""What goes between a worker and the shards of its tables: rows in, gradients of rows out.

Owned by the worker's thread, with its part in the run. What always holds: the rows of a pull are those of one place of the log, on all
ps tasks; a gradient names each key once, and every ps task gets those that are there.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

import torchquorum.wire.messages as m
from torchquorum.memory.key_index import Keys
from torchquorum.update.table_keys import shard_of
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor, tensor_frame
from torchquorum.wire.rpc import error_of
from torchquorum.worker.ps_channels import PsChannels
from torchquorum.worker.row_tables import RowTables

PushedRows = list[tuple[list[m.RowPart], list[torch.Tensor]]]


class RowExchange:
    """Pulls and pushes rows.

    Args:
        tables: The worker's tables.
        channels: The channels to the ps tasks.
        track: Which optimizer's tables they are.

    Attributes:
        norm: That of the gradients that were collected last.
    """

    def __init__(self, tables: RowTables, channels: PsChannels, track: int = 0) -> None:
        self._tables, self._channels, self._specs = tables, channels, tables.specs
        self._num_shards, self._track = len(channels), track
        self.norm = 0.0
        tables.pull, tables.evicted = self.pull, self.evicted

    def pull(self, table: int, keys: Keys) -> torch.Tensor:
        """Returns rows by their keys, each once and in order, as they are at one place of the log."""
        while True:
            answers = self._ask(table, keys)
            if len({version for version, _, _ in answers}) == 1:
                break  # else a ps was restored between two answers
        spec = self._specs[table]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        parts = [
            (mine, frame_tensor(frame, len(mine) * spec.dim * dtype.itemsize).view(dtype).view(len(mine), spec.dim))
            for _, mine, frame in answers
        ]
        if len(parts) == 1:
            return parts[0][1]
        rows = torch.empty((len(keys), spec.dim), dtype=dtype)
        for mine, values in parts:
            rows[torch.from_numpy(mine)] = values
        return rows

    def _ask(self, table: int, keys: Keys) -> list[tuple[int, np.ndarray, Frame]]:
        channels, end = self._channels, self._channels.end
        number = channels.next_number()
        message = m.PullRows(end.index, end.incarnation, number, table, self._track)
        shards = shard_of(keys, self._num_shards)
        mine = [np.flatnonzero(shards == k) for k in range(self._num_shards)]
        packed = [tensor_frame(torch.from_numpy(keys[those]).view(torch.uint8)) for those in mine]

        found: dict[int, tuple[m.Rows, list[Frame]]] = {}
        what, limit_s = f"rows of {self._specs[table].name}", end.patience.round_s

        def ask_again(awaited: int) -> None:
            """Asks those that owe an answer; one that is gone, or has lost its variables, keeps the others from answering."""
            for k in range(self._num_shards):
                if k not in found:
                    channels.asker(k).check(0.0, 0.0, limit_s, what)
                    if k != awaited:
                        self._take(k, number, found)
                    channels.post(k, message, [packed[k]])

        for k in range(self._num_shards):
            channels.post(k, message, [packed[k]])
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
        return [(found[k][0].version, mine[k], found[k][1][0]) for k in range(self._num_shards)]

    def _take(self, k: int, number: int, found: dict[int, tuple[m.Rows, list[Frame]]]) -> None:
        """Takes what a ps task has sent while another was waited for."""
        while (arrived := self._channels.arrive(k, 0.0)) is not None:
            message, frames = arrived
            if isinstance(message, m.Rows) and message.request == number:
                found[k] = message, frames
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

    def collect(self) -> PushedRows:
        """Returns, for each ps task, the gradients of rows that have gathered, to go with a push."""
        found: PushedRows = [([], []) for _ in range(self._num_shards)]
        squares = 0.0
        for number, each in enumerate(self._tables.all):
            gradient = each.take_gradient()
            if gradient is None:
                continue
            keys, rows = gradient[0], gradient[1].cpu()
            squares += float(torch.linalg.vector_norm(rows)) ** 2
            shards = shard_of(keys, self._num_shards)
            for k, (parts, tensors) in enumerate(found):
                mine = np.flatnonzero(shards == k) if self._num_shards > 1 else slice(None)
                own = np.ascontiguousarray(keys[mine])
                values = rows[torch.from_numpy(mine)] if isinstance(mine, np.ndarray) else rows
                parts.append(m.RowPart(number, len(own)))
                tensors += [torch.from_numpy(own), values]
        self.norm = math.sqrt(squares)
        return found
