"""Reading TFRecord files: records one after another, each with its length and two checksums.

    length (8 bytes, little-endian) | masked crc32c of those 8 | data | masked crc32c of the data

Used by `data.shares`, `torchquorum data inspect` and users' programs. What always holds: every record before a damaged one is
delivered, then the error names file and offset; an impossible length allocates no memory; skipped records of a plain file are
not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from torchquorum.errors import DataError
from torchquorum.formats.compression import PackedSource, PlainSource, Source, looks_packed, parse_compression
from torchquorum.formats.crc32c import masked_crc32c, masked_crc32c_many

HEADER_BYTES = 12
FOOTER_BYTES = 4
MAX_RECORD_BYTES = (1 << 31) - 1  # protobuf's own limit for a message
_CHUNK_BYTES = 1 << 19
_SKIM_BYTES = 1 << 13
_BLOCK_RECORDS = 1024
_KNOWN_HEADERS = 4096
_FEWEST_ALIKE = 4
_header = struct.Struct("<QI")


class RecordError(DataError):
    """A record of a file is damaged.

    Attributes:
        path: The file.
        offset: Where the record begins, in the decompressed bytes.
        record: Its index in the file, from 0.
        goes_on: Whether the following records can be read: its length is good, its data is not.
    """

    def __init__(self, text: str, path: Path, offset: int, record: int, goes_on: bool = False) -> None:
        super().__init__(text, path, offset, record, goes_on)  # all arguments, so that it can be pickled
        self.path, self.offset, self.record, self.goes_on = path, offset, record, goes_on

    def __str__(self) -> str:
        return str(self.args[0])


def open_source(path: Path, compression: str | None) -> Source:
    """Opens a file for reading.

    Raises:
        DataError: It cannot be opened.
        ConfigError: There is no such compression.
    """
    kind = parse_compression(compression)
    try:
        if kind is None:
            with path.open("rb") as file:
                head = file.read(HEADER_BYTES)
            # A valid header means a plain file, even if its length looks like gzip's first bytes.
            kind = "none" if _is_header(head) else looks_packed(head)
        return PlainSource(path) if kind == "none" else PackedSource(path, kind)
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {error.strerror}; give a TFRecord file") from error


def _is_header(head: bytes) -> bool:
    return len(head) == HEADER_BYTES and masked_crc32c(head[:8]) == _header.unpack(head)[1]


class RecordReader:
    """Reads the records of one file in order, all or every n-th. Owned by one thread.

    Args:
        path: The file.
        compression: "GZIP", "ZLIB", None for none, or "auto".
        verify: Whether to verify the checksums of the data; those of the lengths are always verified.
        place: Added to the offset of each record, so that a caller can distinguish files.
        stride: 1 for every record, n for every n-th.
        phase: How many records to skip before the first one.

    Attributes:
        phase: How many records to skip before the next one; at the end of a file, in the next file.
    """

    def __init__(
        self,
        path: str | Path,
        compression: str | None = "auto",
        *,
        verify: bool = True,
        place: int = 0,
        stride: int = 1,
        phase: int = 0,
    ) -> None:
        assert 0 <= phase < stride, (phase, stride)
        self.path, self.phase, self._stride = Path(path), phase, stride
        self._source = open_source(self.path, compression)
        self.packed = isinstance(self._source, PackedSource)
        self._verify, self._place = verify, place
        self._buffer, self._at = b"", 0
        self._base = 0  # the offset of the buffer's first byte
        self._count = 0
        self._known: dict[bytes, int] = {}
        self._failure: DataError | None = None

    @property
    def offset(self) -> int:
        """Returns where the next record begins."""
        return self._base + self._at

    def read(self, most: int = _BLOCK_RECORDS) -> list[tuple[bytes, int]]:
        """Returns the next records with their places: at most `most`, at least one unless the file is at its end.

        Raises:
            RecordError: The next record is damaged or cut off.
            DataError: The file cannot be read or decompressed.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            first = self._count
            data, places, footers = self._cut(self.phase + (most - 1) * self._stride + 1)
            self._count += len(data)
            mine = slice(self.phase, None, self._stride)
            self.phase = (self.phase - len(data)) % self._stride
            data, places, footers = data[mine], places[mine], footers[mine]
            if data:
                return self._verified(data, places, footers, first + mine.start)
            if self._failure is None:
                if self.phase:
                    if not self._pass_by(self.phase):
                        return []
                elif not self._fill_to_next():
                    return []

    def skip(self, count: int) -> int:
        """Skips records without reading their data; returns how many were skipped.

        Raises:
            RecordError: A length is damaged, or the file ends inside a record.
            DataError: The file cannot be read or decompressed.
        """
        if count < 1:
            return 0
        before = self.phase
        passed = self._pass_by(before + (count - 1) * self._stride + 1)
        return 0 if passed <= before else (passed - before - 1) // self._stride + 1

    def _pass_by(self, count: int) -> int:
        """Skips records, also those that this reader would not return; returns how many were skipped."""
        left, chunk_bytes = count, _SKIM_BYTES
        while left:
            if self._failure is not None:
                raise self._failure
            if not self._fill(HEADER_BYTES, chunk_bytes):
                break
            header = self._buffer[self._at : self._at + HEADER_BYTES]
            length = self._length(header)
            if self._failure is not None:
                raise self._failure
            size = HEADER_BYTES + length + FOOTER_BYTES
            chunk_bytes = (
                _CHUNK_BYTES if size < _SKIM_BYTES // 2 else _SKIM_BYTES
            )  # long records are skipped by seeking
            run = 1
            beyond = self._at + size - len(self._buffer)
            if beyond > 0:
                there = self._pass_over(beyond)
                if there < beyond:
                    raise self._cut_off("data", length, size - beyond + there)
                self._base += self._at + size
                self._buffer, self._at = b"", 0
            else:
                run = self._count_alike(self._at, header, length, left)
                self._at += run * size
            self._count += run
            left -= run
        self.phase = (self.phase - (count - left)) % self._stride
        return count - left

    def _verified(
        self, data: list[bytes], places: list[int], footers: list[bytes], first: int
    ) -> list[tuple[bytes, int]]:
        """Returns the records up to the first damaged one; its error is kept, or raised if no record comes before it."""
        if self._verify:
            wrong = masked_crc32c_many(data) != np.frombuffer(b"".join(footers), "<u4")
            if wrong.any():
                bad = int(wrong.argmax())
                what = "the data does not match its checksum"
                self._failure = self._damage(places[bad] - self._place, what, first + bad * self._stride, goes_on=True)
                if bad == 0:
                    raise self._failure
                del data[bad:], places[bad:]
        return list(zip(data, places, strict=True))

    def close(self) -> None:
        """Closes the file."""
        self._source.close()

    def _cut(self, most: int) -> tuple[list[bytes], list[int], list[bytes]]:
        """Takes the complete records out of the buffer."""
        buffer, at, size = self._buffer, self._at, len(self._buffer)
        base, known = self._base + self._place, self._known
        data: list[bytes] = []
        places: list[int] = []
        footers: list[bytes] = []
        while len(data) < most and at + HEADER_BYTES <= size:
            header = buffer[at : at + HEADER_BYTES]
            length = known.get(header)
            if length is None:
                self._at = at
                length = self._length(header, self._count + len(data))
                if self._failure is not None:
                    break
            start = at + HEADER_BYTES
            end = start + length
            if end + FOOTER_BYTES > size:
                break
            run = self._count_alike(at, header, length, most - len(data))
            stride = length + HEADER_BYTES + FOOTER_BYTES
            data += [buffer[start + i : end + i] for i in range(0, run * stride, stride)]
            footers += [buffer[end + i : end + FOOTER_BYTES + i] for i in range(0, run * stride, stride)]
            places += range(base + at, base + at + run * stride, stride)
            at += run * stride
        self._at = at
        return data, places, footers

    def _count_alike(self, at: int, header: bytes, length: int, most: int) -> int:
        """Returns how many complete records of the same length follow in the buffer, including this one."""
        buffer, stride = self._buffer, length + HEADER_BYTES + FOOTER_BYTES
        if most < _FEWEST_ALIKE or not all(buffer.startswith(header, at + i * stride) for i in range(1, _FEWEST_ALIKE)):
            return 1
        whole = min(most, (len(buffer) - at) // stride)
        rows = np.frombuffer(buffer, np.uint8, whole * stride, at).reshape(whole, stride)
        alike = (rows[:, :HEADER_BYTES] == np.frombuffer(header, np.uint8)).all(axis=1)
        return whole if alike.all() else max(1, int(alike.argmin()))

    def _length(self, header: bytes, record: int | None = None) -> int:
        """Returns the length in a header; keeps the error if it is damaged."""
        known = self._known.get(header)
        if known is not None:
            return known
        length, stored = _header.unpack(header)
        record = self._count if record is None else record
        if masked_crc32c(header[:8]) != stored:
            what = "the length does not match its checksum"
            if record == 0:
                what += " (is this a TFRecord file with this compression?)"
            self._failure = self._damage(self.offset, what, record)
            return 0
        if length > MAX_RECORD_BYTES:
            what = f"a length of {length:,} bytes; at most {MAX_RECORD_BYTES:,} are allowed"
            self._failure = self._damage(self.offset, what, record)
            return 0
        if len(self._known) >= _KNOWN_HEADERS:
            self._known.clear()
        self._known[header] = length
        return length

    def _fill_to_next(self) -> bool:
        """Reads until the next record is complete; returns whether there is one."""
        if not self._fill(HEADER_BYTES, _CHUNK_BYTES):
            return False
        length = self._length(self._buffer[self._at : self._at + HEADER_BYTES])
        if self._failure is not None:
            return True
        size = HEADER_BYTES + length + FOOTER_BYTES
        there = self._source.size()
        if there is not None and self.offset + size > there:  # allocate no memory for an impossible length
            raise self._cut_off("data", length, there - self.offset)
        self._fill(size, _CHUNK_BYTES)
        if len(self._buffer) - self._at < size:
            raise self._cut_off("data", length, len(self._buffer) - self._at)
        return True

    def _fill(self, size: int, chunk_bytes: int) -> bool:
        """Fills the buffer to at least `size` bytes, unless the file ends; returns False if it is empty.

        Raises:
            RecordError: There are fewer bytes than a header has.
        """
        have = len(self._buffer) - self._at
        if have >= size:
            return True
        pieces = [self._buffer[self._at :]]
        while have < size and (piece := self._read(chunk_bytes)):
            pieces.append(piece)
            have += len(piece)
        self._base += self._at
        self._buffer, self._at = b"".join(pieces), 0
        if 0 < have < HEADER_BYTES:
            raise self._cut_off("length", HEADER_BYTES, have)
        return have > 0

    def _read(self, size_bytes: int) -> bytes:
        try:
            return self._source.read(size_bytes)
        except OSError as error:
            raise DataError(f"{self.path}: it cannot be read: {error.strerror}") from error

    def _pass_over(self, size_bytes: int) -> int:
        try:
            return self._source.skip(size_bytes)
        except OSError as error:
            raise DataError(f"{self.path}: it cannot be read: {error.strerror}") from error

    def _cut_off(self, part: str, length: int, there: int) -> RecordError:
        if part == "length":
            what = f"the file ends in the record's length, after {there} of {HEADER_BYTES} bytes"
        else:
            what = (
                f"the file ends in the record's data: {HEADER_BYTES + length + FOOTER_BYTES:,} bytes are expected, "
                f"{max(0, there):,} exist"
            )
        self._failure = self._damage(self.offset, what)
        return self._failure

    def _damage(self, offset: int, what: str, record: int | None = None, *, goes_on: bool = False) -> RecordError:
        number = self._count if record is None else record
        unpacked = " of the decompressed data" if self.packed else ""
        text = f"{self.path}: record {number:,}, at byte {offset}{unpacked}: {what}; copy or write the file again"
        return RecordError(text, self.path, offset, number, goes_on)


def read_records(path: str | Path, compression: str | None = "auto", *, verify: bool = True) -> Iterator[bytes]:
    """Yields the records of a TFRecord file.

    Args:
        path: The file.
        compression: "GZIP", "ZLIB", None for none, or "auto" to detect it.
        verify: Whether to verify the checksums of the data.

    Raises:
        RecordError: A record is damaged; all records before it have been yielded.
        DataError: The file cannot be read or decompressed.
    """
    reader = RecordReader(path, compression, verify=verify)
    try:
        while block := reader.read():
            for record, _ in block:
                yield record
    finally:
        reader.close()
