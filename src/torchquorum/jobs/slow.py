"""Slowed workers: `--slow worker1:3x` makes worker 1 take three times as long for each batch, as a slower machine would.

Used by the built-in job and `torchquorum compare`. Imports no torch. What always holds: a worker sleeps in proportion to the
measured time of its own batch, and the cores that it does not use are free for the others.
"""

from __future__ import annotations

import math
import re

from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError

MOST = 1000.0
_FORM = re.compile(r"(?:worker)?[\s_#]*(?P<index>[0-9]{1,9})\s*[:=]\s*(?P<factor>[0-9]*\.?[0-9]+)\s*x?", re.IGNORECASE)


def parse_slow(text: str, num_workers: int | None = None) -> dict[int, float]:
    """Reads which workers are slowed, and by which factor.

    Args:
        text: `worker1:3x`, several with commas; `1:3` is accepted too. Empty, or `none`, for none.
        num_workers: The number of workers, if known.

    Raises:
        ConfigError: It is not valid, or there is no such worker.
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
            raise ConfigError(f"--slow {part}: must be from 1x (not slowed) to {MOST:g}x; 3x is three times as slow")
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
    """One worker's slow-down: call `begin` before a batch, and `wait` after it, before its gradient is pushed."""

    def __init__(self, text: str, index: int, num_workers: int, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._factor = parse_slow(text, num_workers).get(index, 1.0)
        self._began_at = 0.0

    def begin(self) -> None:
        """Marks the start of a batch."""
        self._began_at = self._clock.now()

    def wait(self) -> None:
        """Sleeps until the batch has taken its factor of the time that it took."""
        if self._factor > 1.0:
            self._clock.sleep((self._factor - 1.0) * (self._clock.now() - self._began_at))
