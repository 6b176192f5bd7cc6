"""The gradients that were applied on the fast path, in the order of their versions, until the ps has read them.

Part of the page (`torchquorum.fastpath.page`). Workers append under the page's lock; the ps reads. What always holds: a record
that the ps has not read is never overwritten, as workers ask for `room` first.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

from torchquorum.clock import Clock
from torchquorum.fastpath.page_tables import RateTable
from torchquorum.rules.quorum import Key

RECORDS = 8192
_RECORD = struct.Struct("=7q4dq")
_SLOT = struct.Struct("=q")
_SLOT_AT = 6 * 8


class GradientId(NamedTuple):
    """Which gradient of a worker it is, by which request it would be pushed, at which version it was computed, its norm and its sample.

    The norm is NaN, and `sample` 0, if nobody has looked yet.
    """

    incarnation: int
    local_step: int
    request: int
    computed_at: int
    norm: float = math.nan
    sample: int = 0


@dataclass(frozen=True, slots=True)
class GradientRecord:
    """One gradient that became part of `version`, in `slot`; `now` and `wall` are when it was given.

    `norm` is its norm, NaN if nobody looked, `sample` the checksum of a sample of it, or 0. `rates` are the learning rates of that update,
    where a program sets them; they lie in the page's table.
    """

    worker: int
    incarnation: int
    local_step: int
    request: int
    computed_at: int
    version: int
    slot: int
    loss: float | None
    wall: float
    now: float
    norm: float = math.nan
    sample: int = 0
    rates: tuple[float, ...] = ()

    @property
    def key(self) -> Key:
        """Returns the name of the gradient."""
        return Key(self.worker, self.incarnation, self.local_step)


class _Counts(ctypes.Structure):
    _fields_ = (("added", ctypes.c_int64), ("drained", ctypes.c_int64))
    added: int
    drained: int


class RecordRing:
    """A ring of records, and behind it one record for each worker: what it has given to the round that is being made."""

    def __init__(self, memory: memoryview, num_workers: int, clock: Clock, rates: RateTable | None = None) -> None:
        self._counts = _Counts.from_buffer(memory)
        self._records = memory[ctypes.sizeof(_Counts) :]
        self._num_workers, self._ring, self._clock, self._rates = num_workers, RECORDS - num_workers, clock, rates

    @staticmethod
    def size_bytes() -> int:
        """Returns how much memory it needs."""
        return ctypes.sizeof(_Counts) + RECORDS * _RECORD.size

    @property
    def room(self) -> int:
        """Returns how many records may be added before the ps has read some."""
        return self._ring - (self._counts.added - self._counts.drained)

    @property
    def added(self) -> int:
        """Returns how many records were ever added."""
        return self._counts.added

    @property
    def pending(self) -> bool:
        """Whether there is something for the ps to read; needs no lock."""
        return self._counts.added != self._counts.drained

    def add(self, worker: int, gradient: GradientId, loss: float | None, version: int, slot: int) -> None:
        """Records a gradient that has become a version."""
        self._write(self._counts.added % self._ring, worker, gradient, loss, version, slot)
        self._counts.added += 1

    def give(self, worker: int, gradient: GradientId, loss: float | None, version: int) -> None:
        """Keeps what a worker has given to the round that makes `version`."""
        self._write(RECORDS - 1 - worker, worker, gradient, loss, version, -1)

    def add_given(self, worker: int, slot: int) -> None:
        """Records what a worker has given to the round that has become the version in `slot`."""
        size, added = _RECORD.size, self._counts.added
        source, target = (RECORDS - 1 - worker) * size, (added % self._ring) * size
        self._records[target : target + size] = self._records[source : source + size]
        _SLOT.pack_into(self._records, target + _SLOT_AT, slot)
        self._counts.added = added + 1

    def given(self) -> list[GradientRecord]:
        """Returns what was given to the round that is being made, in order of worker."""
        return [self._read(RECORDS - 1 - worker) for worker in range(self._num_workers)]

    def drain(self, end: int | None = None) -> list[GradientRecord]:
        """Returns what was added since the last call, up to number `end`; only the ps calls this.

        Without the lock, if `end` is an `added` that was read under it: workers append behind it.
        """
        end = self._counts.added if end is None else end
        found = [self._read(number % self._ring) for number in range(self._counts.drained, end)]
        self._counts.drained = end
        return found

    def _write(
        self, index: int, worker: int, gradient: GradientId, loss: float | None, version: int, slot: int
    ) -> None:
        _RECORD.pack_into(
            self._records,
            index * _RECORD.size,
            worker,
            gradient.incarnation,
            gradient.local_step,
            gradient.request,
            gradient.computed_at,
            version,
            slot,
            math.nan if loss is None else loss,
            self._clock.wall(),
            self._clock.now(),
            gradient.norm,
            gradient.sample,
        )

    def _read(self, index: int) -> GradientRecord:
        worker, incarnation, local_step, request, computed_at, version, slot, loss, wall, now, norm, sample = (
            _RECORD.unpack_from(self._records, index * _RECORD.size)
        )
        return GradientRecord(
            worker=worker,
            incarnation=incarnation,
            local_step=local_step,
            request=request,
            computed_at=computed_at,
            version=version,
            slot=slot,
            loss=None if math.isnan(loss) else loss,
            wall=wall,
            now=now,
            norm=norm,
            sample=sample,
            rates=tuple(self._rates.of(version - 1)) if self._rates is not None and self._rates.held else (),
        )
