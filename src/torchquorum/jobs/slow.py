"""Slowed workers: `--slow worker1:3x` makes worker 1 take three times as long for each batch, as a slower machine would.

Used by the built-in job and `torchquorum compare`. Imports no torch. What always holds: the slow-down is measured, not
assumed: a worker sleeps in proportion to the time its own batch has just taken, so the cores it does not use are free for
the others.
"""

from __future__ import annotations

import math
import re
import time

from torchquorum.errors import ConfigError

MOST = 1000.0
_FORM = re.compile(r"(?:worker)?[\s_#]*(?P<index>[0-9]{1,9})\s*[:=]\s*(?P<factor>[0-9]*\.?[0-9]+)\s*x?", re.IGNORECASE)


def parse_slow(text: str, num_workers: int | None = None) -> dict[int, float]:
    """Reads which workers are slowed, and how much.

    Args:
        text: `worker1:3x`, several with commas; `1:3` is understood too. Empty, or `none`, for none.
        num_workers: How many workers there are, where that is known.

    Raises:
        ConfigError: It cannot be read, or there is no such worker.
    """
    found: dict[int, float] = {}
    if text.strip().lower() == "none":
        return found
    for part in filter(None, (p.strip().strip("'\"") for p in text.strip().strip("'\"").split(","))):
        match = _FORM.fullmatch(part)
        if match is None:
            raise ConfigError(f"--slow {part}: must look like worker1:3x, several with commas: worker1:3x,worker2:1.5x")
        index, factor = int(match["index"]), float(match["factor"])
        if not 1 <= factor <= MOST or not math.isfinite(factor):
            raise ConfigError(
                f"--slow {part}: must be from 1x (as fast as it is) to {MOST:g}x; 3x is three times as slow"
            )
        if num_workers is not None and index >= num_workers:
            last = num_workers - 1
            allowed = f"worker0 to worker{last}" if last else "worker0 only"
            raise ConfigError(
                f"--slow {part}: there is no worker {index}; with {num_workers} workers there is {allowed}"
            )
        if found.setdefault(index, factor) != factor:
            raise ConfigError(f"--slow {text}: worker {index} has two different factors; keep one of them")
    return found


class Slowness:
    """One worker's slow-down. `begin` before a batch, `wait` after it, before its gradient goes out."""

    def __init__(self, text: str, index: int, num_workers: int) -> None:
        self._factor = parse_slow(text, num_workers).get(index, 1.0)
        self._began_at = 0.0

    def begin(self) -> None:
        """A batch begins."""
        self._began_at = time.perf_counter()

    def wait(self) -> None:
        """The batch is done: sleeps until it has taken its factor of the time it took."""
        if self._factor > 1.0:
            time.sleep((self._factor - 1.0) * (time.perf_counter() - self._began_at))
