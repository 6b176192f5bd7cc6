"""CRC-32C, also masked as in TFRecord files, and of many records at once.

Used by TFRecord files and the journal. google-crc32c computes it with the processor's own instruction; where that package or
its C part is missing, NumPy does, about 70 times slower (12 microseconds for a digit of MNIST; a loop over the bytes takes 95).
What always holds: both give the same numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed
_MASK_DELTA = 0xA282EAD8
_BLOCK_BYTES = 256
_ROWS = np.arange(0, _BLOCK_BYTES * 256, 256)  # the start of each byte's row in the table
_ALL = 0xFFFFFFFF
_GATHERED_BYTES = 1 << 20  # processed at once: their table entries take four times as much memory


def find_library() -> Callable[[bytes], int] | None:
    """Returns the library's function, or None if the library or its C part is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its pure Python fallback is slower than NumPy
        try:
            import google_crc32c
        except ImportError:
            return None
    return google_crc32c.value if google_crc32c.implementation == "c" else None


library = find_library()


def implementation() -> str:
    """Returns which implementation is used: "google-crc32c" or "numpy"."""
    return "numpy" if library is None else "google-crc32c"


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C of some bytes."""
    return crc32c_numpy(data) if library is None else library(data)


def crc32c_pieces(pieces: Iterable[bytes | npt.NDArray[np.uint8]]) -> int:
    """Returns the CRC-32C of bytes that lie in pieces."""
    if library is None:
        return crc32c_numpy(b"".join(map(bytes, pieces)))
    import google_crc32c

    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
    return crc


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C as TFRecord files store it: rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _ALL


def masked_crc32c_many(pieces: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Returns the masked CRC-32C of each of the pieces."""
    value = crc32c_numpy if library is None else library
    crcs = np.fromiter(map(value, pieces), np.uint32, len(pieces))
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(_MASK_DELTA)


@cache
def _byte_table() -> npt.NDArray[np.uint32]:
    """Returns what each byte adds to the register."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


@cache
def _tables() -> tuple[npt.NDArray[np.uint32], tuple[list[int], ...]]:
    """Returns the effect of each byte after any distance, and of each byte of the register after one block.

    The register after a message is the exclusive or of the effects of all its bytes at its end, so a block needs no loop
    over its bytes.
    """
    later = np.empty((_BLOCK_BYTES + 4, 256), np.uint32)
    later[0] = _byte_table()
    for distance in range(1, len(later)):
        before = later[distance - 1]
        later[distance] = (before >> 8) ^ _byte_table()[before & 255]
    # Byte i of the register acts as the message's byte 3 - i before the end of the register.
    shift = tuple(later[_BLOCK_BYTES - 1 - i].tolist() for i in range(4))
    return later[:_BLOCK_BYTES][::-1].ravel(), shift


def crc32c_numpy(data: bytes) -> int:
    """Returns the CRC-32C, computed by NumPy."""
    if len(data) < 4:
        return crc32c_loop(data)
    table, (shift0, shift1, shift2, shift3) = _tables()
    lead = -len(data) % _BLOCK_BYTES  # leading zeros change nothing
    padded = np.zeros(lead + len(data), np.uint8)
    padded[lead:] = np.frombuffer(data, np.uint8)
    padded[lead : lead + 4] ^= 255  # the register starts with ones
    blocks, register = padded.reshape(-1, _BLOCK_BYTES), 0
    for first in range(0, len(blocks), _GATHERED_BYTES // _BLOCK_BYTES):
        some = blocks[first : first + _GATHERED_BYTES // _BLOCK_BYTES]
        for block in np.bitwise_xor.reduce(table.take(some + _ROWS), axis=1).tolist():
            register = block ^ (
                shift0[register & 255]
                ^ shift1[register >> 8 & 255]
                ^ shift2[register >> 16 & 255]
                ^ shift3[register >> 24]
            )
    return register ^ _ALL


def crc32c_loop(data: bytes) -> int:
    """Returns the CRC-32C, computed byte by byte."""
    table, register = _byte_table(), _ALL
    for byte in data:
        register = int(table[(register ^ byte) & 255]) ^ (register >> 8)
    return register ^ _ALL
