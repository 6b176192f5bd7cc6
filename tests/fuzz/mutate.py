"""Makes new inputs out of good ones: a mutation fuzzer in plain Python that keeps what brought a new answer.

Deterministic: the same seed makes the same inputs, as long as the target answers the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

MOST_BYTES = 1 << 16
MOST_KEPT = 500
NUMBERS = [
    0,
    1,
    2,
    7,
    8,
    15,
    16,
    127,
    128,
    255,
    256,
    32767,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
]
TOKENS = [
    b"-1", b"0", b"99999999999999999999", b"1e999", b"nan", b"null", b"true", b"{}", b"[]", b'""', b"\xff\xfe", b"\0",
    b"--", b"=", b",", b":", b"/", b"[", b"]", b"{", b"'", b'"', b"\\", b"\n", b"\xf0\x9f\x98\x80", b"\xed\xa0\x80", b"%s",
    b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"..", b"/etc/passwd",
]  # fmt: skip


class Mutator:
    """Gives inputs; is told what came of each."""

    def __init__(self, seeds: Sequence[bytes], seed: int) -> None:
        self._random = random.Random(seed)
        self._pool = list(seeds) or [b""]
        self._answers: set[str] = set()

    def next(self) -> bytes:
        """Returns a new input."""
        rng = self._random
        if rng.random() < 0.02:
            return rng.randbytes(rng.choice((0, 1, 2, 3, 4, 8, 16, 64, 300)))
        body = bytearray(rng.choice(self._pool))
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5, 8))):
            self._change(body)
        return bytes(body[:MOST_BYTES])

    def _change(self, body: bytearray) -> None:
        rng = self._random
        at = rng.randrange(len(body) + 1)
        size = min(rng.choice((1, 1, 2, 4, 8, 16, 64)), len(body) - at)
        match rng.randrange(10):
            case 0 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(body):
                body[at] = rng.randrange(256)
            case 2:
                body[at:at] = rng.choice(TOKENS)
            case 3:
                del body[at : at + size]
            case 4:
                body[at:at] = body[at : at + size] * rng.choice((1, 2, 10, 100))
            case 5:
                width = rng.choice((1, 2, 4, 8))
                order = rng.choice(("little", "big"))
                number = rng.choice(NUMBERS) % (1 << 8 * width)
                body[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
            case 6:
                other = rng.choice(self._pool)
                start = rng.randrange(len(other) + 1)
                body[at:] = other[start:]
            case 7:
                del body[at:]
            case 8 if at < len(body):
                body[at:at] = body[at : at + 1] * rng.choice((3, 50, 5000))  # digits and brackets without end
            case _:
                body[at : at + size] = rng.randbytes(size)

    def tell(self, body: bytes, answer: str) -> None:
        """Takes what a target answered; an input with a new kind of answer is one to go on from."""
        kind = re.sub(r"[0-9]+|'[^']*'|\"[^\"]*\"|/\S+", "#", answer)[:120]
        if kind not in self._answers and len(self._answers) < MOST_KEPT:
            self._answers.add(kind)
            self._pool.append(body)

    @property
    def answers(self) -> int:
        """Returns how many kinds of answers have come."""
        return len(self._answers)
