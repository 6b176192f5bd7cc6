"""One feature of a whole batch: filled from many similar rows of bytes at once, or from single rows.

Called by `parsing`. Each kind of specification has its column class. What always holds: every row is filled exactly once, in
one of the two ways; a row whose values do not match the specification raises `RowError` with its number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from torchquorum.data.features import FixedLenFeature, RawFeature, Spec, VarLenFeature
from torchquorum.formats.example import KINDS, Kind, Scanned
from torchquorum.formats.protobuf import ExampleError, decode_varints

Bytes = npt.NDArray[np.uint8]
_CALLED = {"bytes_list": "strings", "float_list": "floats", "int64_list": "int64s"}


class RowError(ExampleError):
    """A row of a batch does not match the specification.

    Attributes:
        row: Its number in the batch.
    """

    def __init__(self, row: int, what: str) -> None:
        super().__init__(what)
        self.row = row

    def __reduce__(self) -> tuple[object, ...]:
        return RowError, (self.row, str(self))


class Column(Protocol):
    """What the parser needs from a column."""

    def fill(self, rows: Any, matrix: Bytes, found: Scanned, ints: Ints | None) -> None:
        """Fills rows that have the layout of the first one, in which the values were `found`."""
        ...

    def put(self, row: int, record: bytes, found: Scanned | None) -> None:
        """Fills a single row from its record; `found` is None if the row has no such feature."""
        ...

    def finish(self) -> Any:
        """Returns the batch of this feature."""
        ...


class Ints:
    """The positions of the varints in a row, equal for all rows of one layout."""

    def __init__(self, packed: Bytes) -> None:
        decode_varints(packed)  # raises if they are not valid
        ends = np.flatnonzero(packed < 128)
        starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
        lengths = ends - starts + 1
        self.count = len(ends)
        self._simple = self.count == len(packed)
        # For each byte of a varint: which numbers are that long, and where that byte is.
        self._places = [
            (place, np.flatnonzero(lengths > place), (starts + place)[lengths > place])
            for place in range(int(lengths.max(initial=0)))
        ]

    def decode(self, packed: Bytes) -> npt.NDArray[np.int64]:
        """Returns the numbers of each row."""
        if self._simple:
            return packed.astype(np.int64)
        values = np.zeros((len(packed), self.count), np.uint64)
        for place, which, where in self._places:
            bits = (packed[:, where] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * place)
            if len(which) == self.count:
                values |= bits
            else:
                values[:, which] |= bits
        return values.view(np.int64)


def join_columns(matrix: Bytes, pieces: Sequence[tuple[int, int]]) -> Bytes:
    """Returns the columns of the pieces, one piece after another."""
    if len(pieces) == 1:
        return matrix[:, pieces[0][0] : pieces[0][1]]
    return np.concatenate([matrix[:, :0], *(matrix[:, start:end] for start, end in pieces)], axis=1)


def make_column(name: str, spec: Spec, rows: int) -> Column:
    """Returns an empty column for a batch of `rows` rows."""
    if isinstance(spec, RawFeature):
        return _RawColumn(name, spec, rows)
    if isinstance(spec, VarLenFeature):
        return _VariedColumn(name, spec, rows)
    return _StringColumn(name, spec, rows) if spec.kind == "bytes_list" else _NumberColumn(name, spec, rows)


def _absent(found: Scanned | None) -> bool:
    return found is None or found[0] is None


def _check_kind(name: str, wanted: Kind, found: Kind | None, row: int) -> None:
    if found != wanted:
        there = _CALLED[found] if found in KINDS else "nothing"
        raise RowError(row, f"feature {name!r} is a list of {there}, expected {_CALLED[wanted]}; change its dtype")


def _missing(name: str, row: int) -> RowError:
    return RowError(row, f"feature {name!r} is missing, and has no default_value")


def _wrong_count(name: str, row: int, there: int, kind: Kind, spec: FixedLenFeature) -> RowError:
    return RowError(
        row,
        f"feature {name!r} has {there} {_CALLED[kind]}, expected {math.prod(spec.shape)} for shape {list(spec.shape)}; "
        "change the shape, or use VarLenFeature",
    )


def _numbers(record: bytes, found: Scanned, row: int) -> npt.NDArray[Any]:
    """Returns the numbers of one row."""
    kind, pieces, _ = found
    packed = b"".join(record[start:end] for start, end in pieces)
    if kind == "float_list":
        return np.frombuffer(packed, "<f4")
    try:
        return decode_varints(np.frombuffer(packed, np.uint8))[0]
    except ExampleError as error:
        raise RowError(row, str(error)) from None


def _default(name: str, spec: FixedLenFeature, row: int) -> Any:
    """Returns the default for a row without the feature; raises if there is none."""
    if spec.default_value is None:
        raise _missing(name, row)
    return spec.default_value


class _NumberColumn:
    def __init__(self, name: str, spec: FixedLenFeature, rows: int) -> None:
        self._name, self._spec = name, spec
        self._kind: Kind = spec.kind
        self._size = math.prod(spec.shape)
        dtype = np.float32 if self._kind == "float_list" else np.int64
        self._out = np.empty((rows, self._size), dtype)
        self._rows: list[int] = []
        self._packed: list[bytes] = []

    def fill(self, rows: Any, matrix: Bytes, found: Scanned, ints: Ints | None) -> None:
        pieces = join_columns(matrix, found[1])
        if ints is not None:
            self._out[rows] = ints.decode(pieces)
        else:
            self._out[rows] = np.ascontiguousarray(pieces).view("<f4")

    def put(self, row: int, record: bytes, found: Scanned | None) -> None:
        if found is None or _absent(found):
            self._out[row] = _default(self._name, self._spec, row)
            return
        kind, pieces, _ = found
        _check_kind(self._name, self._kind, kind, row)
        self._rows.append(row)
        self._packed.append(
            record[pieces[0][0] : pieces[0][1]] if len(pieces) == 1 else b"".join(record[s:e] for s, e in pieces)
        )

    def finish(self) -> torch.Tensor:
        if self._rows:
            self._decode()
        return torch.from_numpy(self._out.reshape(len(self._out), *self._spec.shape))

    def _decode(self) -> None:
        if len(self._rows) == 1:
            values = _numbers(self._packed[0], (self._kind, [(0, len(self._packed[0]))], True), self._rows[0])
            if len(values) != self._size:
                self._raise_first()
            self._out[self._rows[0]] = values
            return
        joined = b"".join(self._packed)
        if self._kind == "float_list":
            if any(len(packed) != 4 * self._size for packed in self._packed):
                self._raise_first()
            self._out[self._rows] = np.frombuffer(joined, "<f4").reshape(-1, self._size)
            return
        lengths = np.array([len(packed) for packed in self._packed])
        ends, numbers = np.cumsum(lengths), np.frombuffer(joined, np.uint8)
        try:
            values, continued = decode_varints(numbers)
        except ExampleError:
            self._raise_first()
            raise
        # At the end of each row a number must end, and the numbers so far must be those of the rows so far.
        unfinished = (numbers[ends[lengths > 0] - 1] > 127).any()
        ended = ends - np.searchsorted(continued, ends)
        if unfinished or (ended != np.arange(1, len(ends) + 1) * self._size).any():
            self._raise_first()
        self._out[self._rows] = values.reshape(-1, self._size)

    def _raise_first(self) -> None:
        """Raises the error of the first bad row."""
        for row, packed in zip(self._rows, self._packed, strict=True):
            there = len(_numbers(packed, (self._kind, [(0, len(packed))], True), row))
            if there != self._size:
                raise _wrong_count(self._name, row, there, self._kind, self._spec)


class _RawColumn:
    def __init__(self, name: str, spec: RawFeature, rows: int) -> None:
        self._name, self._spec = name, spec
        self._dtype = spec.numpy_dtype
        self._out = np.empty((rows, math.prod(spec.shape)), self._dtype)

    def fill(self, rows: Any, matrix: Bytes, found: Scanned, ints: Ints | None) -> None:
        self._out[rows] = np.ascontiguousarray(join_columns(matrix, found[1])).view(self._dtype)

    def put(self, row: int, record: bytes, found: Scanned | None) -> None:
        if found is None or _absent(found):
            raise RowError(row, f"feature {self._name!r} is missing")
        kind, pieces, _ = found
        _check_kind(self._name, "bytes_list", kind, row)
        sizes = [end - start for start, end in pieces]
        wanted = self._out.shape[1] * self._dtype.itemsize
        if sizes != [wanted]:
            there = f"{sizes[0]:,} bytes" if len(sizes) == 1 else f"{len(sizes)} strings"
            raise RowError(
                row,
                f"feature {self._name!r} has {there}, expected one string of {wanted:,} bytes for shape "
                f"{list(self._spec.shape)} of {self._dtype.name}",
            )
        self._out[row] = np.frombuffer(record, self._dtype, self._out.shape[1], pieces[0][0])

    def finish(self) -> torch.Tensor:
        native = self._out.astype(self._dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(native.reshape(len(native), *self._spec.shape))


class _StringColumn:
    def __init__(self, name: str, spec: FixedLenFeature, rows: int) -> None:
        self._name, self._spec = name, spec
        self._size = math.prod(spec.shape)
        self._out: list[list[bytes]] = [[]] * rows

    def fill(self, rows: Any, matrix: Bytes, found: Scanned, ints: Ints | None) -> None:
        for row, line in zip(_numbered(rows, len(matrix)), matrix, strict=True):
            self._out[row] = [line[start:end].tobytes() for start, end in found[1]]

    def put(self, row: int, record: bytes, found: Scanned | None) -> None:
        if found is None or _absent(found):
            self._out[row] = _default(self._name, self._spec, row)
            return
        kind, pieces, _ = found
        _check_kind(self._name, "bytes_list", kind, row)
        if len(pieces) != self._size:
            raise _wrong_count(self._name, row, len(pieces), "bytes_list", self._spec)
        self._out[row] = [record[start:end] for start, end in pieces]

    def finish(self) -> list[Any]:
        if not self._spec.shape:
            return [values[0] for values in self._out]
        return [_nest(values, tuple(self._spec.shape)) for values in self._out]


class _VariedColumn:
    def __init__(self, name: str, spec: VarLenFeature, rows: int) -> None:
        self._name, self._spec = name, spec
        self._kind: Kind = spec.kind
        self._dtype = np.float32 if self._kind == "float_list" else np.int64
        self._out: list[Any] = [[] if self._kind == "bytes_list" else np.empty(0, self._dtype)] * rows

    def fill(self, rows: Any, matrix: Bytes, found: Scanned, ints: Ints | None) -> None:
        if self._kind == "bytes_list":
            lines: Any = ([line[start:end].tobytes() for start, end in found[1]] for line in matrix)
        else:
            pieces = join_columns(matrix, found[1])
            lines = ints.decode(pieces) if ints is not None else np.ascontiguousarray(pieces).view("<f4")
        for row, values in zip(_numbered(rows, len(matrix)), lines, strict=True):
            self._out[row] = values

    def put(self, row: int, record: bytes, found: Scanned | None) -> None:
        if found is None or _absent(found):
            return
        kind, pieces, _ = found
        _check_kind(self._name, self._kind, kind, row)
        if kind == "bytes_list":
            self._out[row] = [record[start:end] for start, end in pieces]
        else:
            self._out[row] = _numbers(record, found, row)

    def finish(self) -> Any:
        if self._kind == "bytes_list":
            return self._out
        if self._spec.pad_value is None:
            return [torch.from_numpy(values.astype(self._dtype)) for values in self._out]
        longest = max((len(values) for values in self._out), default=0)
        padded = np.full((len(self._out), longest), self._spec.pad_value, self._dtype)
        for line, values in zip(padded, self._out, strict=True):
            line[: len(values)] = values
        return torch.from_numpy(padded)


def _numbered(rows: Any, count: int) -> Any:
    return range(count) if isinstance(rows, slice) else rows


def _nest(values: list[bytes], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return values
    step = math.prod(shape[1:])
    return [_nest(values[at * step : (at + 1) * step], shape[1:]) for at in range(shape[0])]
