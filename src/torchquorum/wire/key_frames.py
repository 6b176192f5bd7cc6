"""Keys of rows as few bytes on a connection: in order, as gaps, most of which are small.

Used by workers that push and pull rows over TCP, and by the ps tasks that read them. Layout: one byte, the width of a gap; the first key,
8 bytes; the gaps that follow, each of that width, little-endian; a gap with all bits set stands for one that is too large, and these
follow, 8 bytes each. What always holds: at most 9 bytes more than the plain keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchquorum.wire.codec import Frame

Keys = npt.NDArray[np.int64]
WIDTHS = range(1, 9)


def pack_keys(keys: Keys) -> memoryview:
    """Returns keys, which are in order, each once."""
    if not len(keys):
        return memoryview(b"")
    gaps = np.diff(keys.view(np.uint64))
    bits = np.bincount(_bytes_of(gaps + np.uint64(1)), minlength=9)  # all bits set is no gap
    large = np.concatenate([np.cumsum(bits[::-1])[::-1][1:], [0]])  # gaps that are wider than so many bytes
    width = min(WIDTHS, key=lambda w: w * len(gaps) + 8 * int(large[w]))
    most = np.uint64((1 << 8 * width) - 1)
    too_large = gaps >= most if width < 8 else np.zeros(len(gaps), np.bool_)
    written = np.where(too_large, most, gaps).astype("<u8")
    head = np.frombuffer(bytes([width]) + keys[:1].astype("<i8").tobytes(), np.uint8)
    body = written.view(np.uint8).reshape(-1, 8)[:, :width].reshape(-1)
    whole = np.concatenate([head, body, gaps[too_large].astype("<u8").view(np.uint8)])
    return memoryview(whole)  # pyright: ignore[reportArgumentType]


def unpack_keys(frame: Frame, count: int) -> Keys:
    """Returns so many keys.

    Raises:
        ValueError: That is not what the frame has.
    """
    data = np.frombuffer(frame, np.uint8)
    if not count and not len(data):
        return np.empty(0, np.int64)
    end = 9 + (int(data[0]) if len(data) else 0) * (count - 1)
    if count < 1 or len(data) < 9 or data[0] not in WIDTHS or len(data) < end or (len(data) - end) % 8:
        raise ValueError(f"{len(data)} bytes are no {count} keys")
    width, gaps = int(data[0]), np.zeros((count - 1, 8), np.uint8)
    gaps[:, :width] = data[9:end].reshape(-1, width)
    found = np.empty(count, np.uint64)
    found[:1] = data[1:9].copy().view("<u8")
    found[1:] = gaps.reshape(-1).view("<u8")
    if width < 8:
        too_large = np.flatnonzero(found[1:] == np.uint64((1 << 8 * width) - 1)) + 1
        if 8 * len(too_large) != len(data) - end:
            raise ValueError(f"{len(data)} bytes are no {count} keys")
        found[too_large] = data[end:].copy().view("<u8")
    elif end != len(data):
        raise ValueError(f"{len(data)} bytes are no {count} keys")
    return np.cumsum(found, dtype=np.uint64).view(np.int64)


def _bytes_of(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Returns how many bytes each value takes, at least one; 0, which is the largest gap and one more, takes eight."""
    thresholds = np.array([(1 << 8 * w) - 1 for w in range(1, 8)], np.uint64)
    return np.where(values == 0, 8, np.searchsorted(thresholds, values) + 1)
