"""A durable run on the fast path: the worker that makes an update writes its record to the journal before it publishes the version.

Owned by the worker's thread, through its turns or rounds. What always holds: the record stands in the file before the version is published;
a worker is told of an update only if the ps was still alive after that, so that whoever restores the run finds it; what could not be
written whole is cut off again before somebody else writes, or the ps begins another file.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from torchquorum.clock import SYSTEM, Clock
from torchquorum.fastpath.page import OPEN, FastPage
from torchquorum.fastpath.records import GradientId
from torchquorum.formats.crc32c import crc32c_pieces
from torchquorum.formats.journal import GradientNote, Record
from torchquorum.formats.journal_write import Payload, Pieces, encode_record, write_record
from torchquorum.placement.layout import ITEM_BYTES, Region
from torchquorum.wire.settings import RATE

DISK_S = 1.0  # whoever has waited so long for another worker's disk waits for the disk itself


class JournaledMean(NamedTuple):
    """The mean gradient of an update, as the bytes of a region.

    Attributes:
        pieces: The bytes.
        checksum: Their checksum.
        absent: The variables that have none.
    """

    pieces: Pieces
    checksum: int
    absent: Sequence[int] = ()

    @classmethod
    def of(cls, pieces: Pieces, absent: Sequence[int] = ()) -> JournaledMean:
        """Returns it with its checksum."""
        return cls(pieces, crc32c_pieces(pieces), absent)


class Giver(NamedTuple):
    """A gradient that is in an update: whose it is, and its loss."""

    worker: int
    gradient: GradientId
    loss: float | None


class UpdateJournal:
    """What one worker writes to the journal.

    Args:
        page: The ps's page.
        clock: Tells the time.

    Raises:
        OSError: The ps's process cannot be watched.
    """

    def __init__(self, page: FastPage, clock: Clock = SYSTEM) -> None:
        self._page, self._tail, self._clock = page, page.journal, clock
        self._fd, self._number = -1, 0
        self._at, self._end = -1, 0  # where an update that does not count yet was appended, and where it ends
        self._ps = os.pidfd_open(self._tail.words.pid)
        self._poller = select.poll()
        self._poller.register(self._ps, select.POLLIN)

    def append(
        self, opening_id: int, version: int, givers: Sequence[Giver], rates: Sequence[float], mean: JournaledMean
    ) -> bool:
        """Writes the record of the update that makes `version`; False if that is impossible, or not this worker's to do any more.

        Nobody else writes: the caller has the turn, or was the last of a round.
        """
        if not self._follow(opening_id):
            return False
        wall, held = self._clock.wall(), self._page.rates.held
        record = Record(
            version,
            list(mean.absent),
            [(giver.worker, giver.gradient.incarnation, giver.gradient.local_step) for giver in givers],
            settings=[{RATE: rate} for rate in rates] if held else [],
            told=max(giver.gradient.computed_at for giver in givers),
            given=[
                GradientNote(of.computed_at, loss, wall, None if math.isnan(of.norm) else of.norm, list(rates))
                for _, of, loss in givers
            ],
        )
        self._at = self._tail.words.end
        try:
            self._end = write_record(self._fd, self._at, encode_record(record), mean.pieces, mean.checksum)
        except OSError:
            self.undo()
            return False
        return True

    def count(self) -> None:
        """What was appended counts; under the page's lock, with the record for the ps."""
        self._tail.words.end, self._at = self._end, -1

    def undo(self) -> None:
        """Removes what was appended and does not count; nobody else has written behind it."""
        if self._at >= 0:
            with suppress(OSError):
                os.ftruncate(self._fd, self._at)
            self._at = -1

    def survives(self, version: int) -> bool:
        """Whether a version that was published survives whatever dies now: its record is on disk where it must be, and the ps is alive.

        A ps that is alive after the record was written is restored, if it dies, by somebody who reads the file later.
        """
        if self._tail.words.waits and not self._on_disk(version):
            return False
        return not self._poller.poll(0)

    def close(self) -> None:
        """Closes the files."""
        for fd in (self._fd, self._ps):
            if fd >= 0:
                os.close(fd)
        self._fd = self._ps = -1

    def _follow(self, opening_id: int) -> bool:
        """Opens the file that the ps has lent in an opening; False if that is over."""
        words, page = self._tail.words, self._page.words
        self._at = -1
        if words.number != self._number:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._number = -1, 0
            number = words.number
            try:
                self._fd = os.open(f"/proc/{words.pid}/fd/{words.fd}", os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                return False
            if page.state != OPEN or page.opening_id != opening_id:  # the descriptor may have been another file by then
                os.close(self._fd)
                self._fd = -1
                return False
            self._number = number
        return page.opening_id == opening_id

    def _on_disk(self, version: int) -> bool:
        """Waits until the disk has an update; one wait serves all that were published before it."""
        tail, words, page = self._tail, self._tail.words, self._page
        tail.disk_lock.timeout_s = DISK_S
        while words.on_disk < version:
            with tail.disk_lock:  # also without it, if its holder is frozen
                if words.on_disk >= version:
                    return True
                with page.locked():
                    reached, same = page.version, words.number == self._number
                if not same:
                    return True  # the ps has begun another file, and has waited for the disk before
                try:
                    os.fdatasync(self._fd)
                except OSError:
                    return False
                words.on_disk = max(words.on_disk, reached)
        return True


class RegionBytes:
    """Cuts what lies in parts into the bytes of a region, in order, with zeros between them.

    Args:
        region: The region.
        places: Of each part, the first of its bytes in the region and how many.
    """

    def __init__(self, region: Region, places: Sequence[tuple[int, int]]) -> None:
        self._order = sorted(range(len(places)), key=lambda k: places[k][0])
        at, self._before = 0, list[bytes]()
        for k in self._order:
            start, size_bytes = places[k]
            self._before.append(bytes(start - at))
            at = start + size_bytes
        self._after = bytes(region.size_bytes - at)
        self._zeros = [bytes(size_bytes) for _, size_bytes in places]

    @classmethod
    def of_pieces(cls, region: Region) -> RegionBytes:
        """Returns what cuts a part for each piece of each section, in their order."""
        places = [
            (s.start_byte + p.offset * ITEM_BYTES[s.dtype], p.numel * ITEM_BYTES[s.dtype])
            for s in region.sections
            for p in s.pieces
        ]
        return cls(region, places)

    def pieces(self, parts: Sequence[torch.Tensor | None]) -> list[Payload]:
        """Returns the bytes; None is a part of zeros."""
        found: list[Payload] = []
        for k, before in zip(self._order, self._before, strict=True):
            if before:
                found.append(before)
            part = parts[k]
            found.append(self._zeros[k] if part is None else as_bytes(part))
        return [*found, self._after] if self._after else found


def as_bytes(values: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Returns the bytes of values, in the order of their elements; of memory that is contiguous a view."""
    return values.detach().reshape(-1).view(torch.uint8).numpy()
