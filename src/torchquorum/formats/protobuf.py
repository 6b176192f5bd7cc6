"""The wire format of protocol buffers, as far as tf.train.Example needs it: varints and fields.

Used by `example` and by `data.parsing`. Lists of numbers are decoded and encoded by NumPy, all at once. What always holds:
invalid bytes raise `ExampleError` with their position in the record; nothing is read outside the given bounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torchquorum.errors import DataError

VARINT, FIXED64, BYTES, START_GROUP, END_GROUP, FIXED32 = range(6)
_LONGEST_VARINT = 10
_DEEPEST_GROUP = 100
_FEW = 8
_ALL_BITS = (1 << 64) - 1


class ExampleError(DataError):
    """A record is not a tf.train.Example, or not the expected one."""


def _bad(at: int, what: str) -> ExampleError:
    return ExampleError(f"not a tf.train.Example: {what} at byte {at} of the record")


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Returns the varint at `at`, as an unsigned number of 64 bits, and the position after it."""
    value = shift = 0
    for place in range(at, min(end, at + _LONGEST_VARINT)):
        byte = data[place]
        value |= (byte & 127) << shift
        if byte < 128:
            return value & _ALL_BITS, place + 1  # as in protobuf: excess bits of the tenth byte are dropped
        shift += 7
    raise _bad(at, "a number that does not end" if end - at < _LONGEST_VARINT else "a number of more than ten bytes")


def read_length(data: bytes, at: int) -> tuple[int, int]:
    """Returns the length at `at`, and the position after it; raises IndexError at the end of the bytes."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    following = data[at + 1]
    if following < 128:
        return byte & 127 | following << 7, at + 2
    return read_varint(data, at, len(data))


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (tag, start, end) of each field of the message in data[at:end]; for BYTES, without the length.

    Groups, a deprecated feature, are skipped. A tag is the field's number times eight plus its wire type.
    """
    while at < end:
        tag = data[at]
        if tag < 128:
            at += 1
        else:
            tag, at = _read_long_tag(data, at, end)
        kind = tag & 7
        if kind == BYTES:
            if at < end and data[at] < 128:
                start = at + 1
                stop = start + data[at]
            else:
                length, start = read_varint(data, at, end)
                stop = start + length
            if stop > end:
                raise _bad(at, f"a field of {stop - start:,} bytes where {end - start:,} are left")
        elif kind == START_GROUP and tag >= 8:
            at = _skip_group(data, at, end, tag >> 3)
            continue
        else:
            start, stop = at, _skip_number(data, at, end, kind)
        if tag < 8:
            raise _bad(at, "a field with the number 0")
        yield tag, start, stop
        at = stop


def _read_long_tag(data: bytes, at: int, end: int) -> tuple[int, int]:
    tag, after = read_varint(data, at, min(end, at + 5))
    if tag >> 32:
        raise _bad(at, "a field with too large a number")
    return tag, after


def _skip_number(data: bytes, at: int, end: int, kind: int) -> int:
    if kind == VARINT:
        return read_varint(data, at, end)[1]
    if kind not in (FIXED32, FIXED64):
        raise _bad(at, "the end of a group that has no start" if kind == END_GROUP else f"a field of the kind {kind}")
    stop = at + (4 if kind == FIXED32 else 8)
    if stop > end:
        raise _bad(at, "a number that does not end")
    return stop


def _skip_group(data: bytes, at: int, end: int, number: int) -> int:
    """Returns the end of the group whose opening tag was just read."""
    open_groups = [number]
    while open_groups:
        if at >= end:
            raise _bad(at, "a group that does not end")
        tag, at = _read_long_tag(data, at, end)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise _bad(at, "a field with the number 0")
        if kind == START_GROUP:
            open_groups.append(number)
            if len(open_groups) > _DEEPEST_GROUP:
                raise _bad(at, f"more than {_DEEPEST_GROUP} nested groups")
        elif kind == END_GROUP:
            if open_groups.pop() != number:
                raise _bad(at, "the end of another group")
        elif kind == BYTES:
            length, start = read_varint(data, at, end)
            at = start + length
            if at > end:
                raise _bad(start, f"a field of {length:,} bytes where {end - start:,} are left")
        else:
            at = _skip_number(data, at, end, kind)
    return at


def decode_varints(packed: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Decodes consecutive varints.

    Returns:
        The numbers, and the positions of all bytes that are not the last one of their number.

    Raises:
        ExampleError: The last number does not end, or one has more than ten bytes.
    """
    continued = np.flatnonzero(packed > 127)
    if len(continued) == 0:
        return packed.astype(np.int64), continued
    if continued[-1] == len(packed) - 1:
        raise _bad(len(packed), "in a list, a number that does not end")
    values = packed[packed < 128].astype(np.uint64)
    # The number that such a byte belongs to: how many final bytes precede it.
    numbers = continued - np.arange(len(continued))
    first = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
    counts = np.diff(np.append(first, len(numbers)))
    most = int(counts.max())
    if most >= _LONGEST_VARINT:
        raise _bad(0, "in a list, a number of more than ten bytes")
    long = numbers[first]
    some = values[long] << (7 * counts).astype(np.uint64)
    for place in range(most):
        longer = counts > place
        bits = (packed[continued[first[longer] + place]] & np.uint8(127)).astype(np.uint64)
        some[longer] |= bits << np.uint64(7 * place)
    values[long] = some
    return values.view(np.int64), continued


def encode_varint(value: int) -> bytes:
    """Returns a number, 0 or more, as a varint."""
    if value < 128:
        return value.to_bytes(1, "little")
    pieces = bytearray()
    while value >= 128:
        pieces.append(value & 127 | 128)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)


def encode_varints(numbers: npt.NDArray[np.int64]) -> bytes:
    """Returns the numbers as consecutive varints; a negative one takes ten bytes."""
    if len(numbers) < _FEW:
        return b"".join(encode_varint(int(number) & _ALL_BITS) for number in numbers)
    values = numbers.astype(np.int64, copy=False).view(np.uint64)
    if int(values.max()) < 128:
        return values.astype(np.uint8).tobytes()
    lengths = np.ones(len(values), np.intp)
    for place in range(1, _LONGEST_VARINT):
        lengths += values >= np.uint64(1 << 7 * place)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    packed = np.empty(int(ends[-1]), np.uint8)
    for place in range(int(lengths.max())):
        longer = np.flatnonzero(lengths > place)
        bits = ((values[longer] >> np.uint64(7 * place)) & np.uint64(127)).astype(np.uint8)
        packed[starts[longer] + place] = bits | np.where(lengths[longer] > place + 1, 128, 0).astype(np.uint8)
    return packed.tobytes()


def encode_field(number: int, content: bytes) -> bytes:
    """Returns a field of BYTES."""
    return encode_varint(number << 3 | BYTES) + encode_varint(len(content)) + content
