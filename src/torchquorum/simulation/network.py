"""The time that bytes take between workers and ps tasks.

Owned by one simulation. The model: variables are spread evenly over the ps tasks; each ps sends and receives at its bandwidth,
both at once, one transfer after another in the order in which they begin; a worker has a bandwidth of its own. What always
holds: a transfer ends no earlier than one that began before it on the same link.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torchquorum.errors import ConfigError

_SIZES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_RATES = {"bit": 0.125, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_FORM = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)(?:/s)?")


@dataclass(frozen=True, kw_only=True)
class Network:
    """What lies between workers and ps tasks.

    Attributes:
        size_bytes: The bytes of a gradient, and of the variables; 0 for no network.
        bandwidth: Bytes per second of each ps, in each direction.
        worker_bandwidth: Bytes per second of each worker; None for the same.
        latency_s: Seconds that each transfer takes beside its bytes.
        ps: The number of ps tasks.
    """

    size_bytes: float = 0.0
    bandwidth: float = math.inf
    worker_bandwidth: float | None = None
    latency_s: float = 0.0
    ps: int = 1

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or self.bandwidth <= 0 or self.latency_s < 0 or self.ps < 1:
            raise ConfigError(f"{self}: bytes and latency must be 0 or more, bandwidth above 0, and ps 1 or more")

    @property
    def shared_s(self) -> float:
        """Returns the seconds that one transfer takes of the ps tasks' links."""
        return self.size_bytes / (self.ps * self.bandwidth)

    @property
    def alone_s(self) -> float:
        """Returns the seconds of one transfer while there is no other, without latency."""
        return max(self.shared_s, self.size_bytes / (self.worker_bandwidth or self.bandwidth))

    @property
    def instant(self) -> bool:
        """Whether a transfer takes no time."""
        return self.alone_s + self.latency_s == 0.0


class SharedLink:
    """One direction of the ps tasks' links, which transfers share."""

    def __init__(self, network: Network) -> None:
        self._shared_s, self._alone_s, self._latency_s = network.shared_s, network.alone_s, network.latency_s
        self._free_at = 0.0

    def transfer(self, now: float) -> float:
        """A transfer begins; returns when it ends."""
        self._free_at = max(self._free_at, now) + self._shared_s
        return max(self._free_at, now + self._alone_s) + self._latency_s


def parse_size(text: str) -> float:
    """Reads a number of bytes: `100000`, `100kB`, `1.5GB`, `64MiB`.

    Raises:
        ConfigError: It is none.
    """
    return _parse(text, _SIZES, "must be a size, such as 100MB, 1.5GB or 64MiB")


def parse_bandwidth(text: str) -> float:
    """Reads a bandwidth as bytes per second: `10Gbit`, `100Mbit/s`, `1.2GB/s`.

    Raises:
        ConfigError: It is none.
    """
    return _parse(text, _RATES, "must be a bandwidth with its unit, such as 10Gbit, 100Mbit or 1.2GB/s")


def _parse(text: str, units: dict[str, float], must: str) -> float:
    match = _FORM.fullmatch(text.strip().lower())
    if match is None or match[2] not in units or float(match[1]) <= 0:
        raise ConfigError(f"{text!r}: {must}")
    return float(match[1]) * units[match[2]]
