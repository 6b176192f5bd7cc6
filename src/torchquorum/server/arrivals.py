"""The gradients that have reached some shards and not all: shard 0 asks the quorum when one is complete.

Owned by the leader. What always holds: the oldest are dropped when there are too many.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torchquorum.rules.quorum import Key
from torchquorum.wire.settings import Settings
from torchquorum.wire.worker_messages import Contribution

REMEMBERED_ARRIVALS = 4096


@dataclass(slots=True)
class Arrival:
    """A gradient that has reached some shards; all but `shards` comes with shard 0's own part."""

    version: int | None = None
    loss: float | None = None
    finite: bool = True
    settings: Settings = field(default_factory=list)
    norm: float | None = None
    track: int = 0
    sample: int = 0
    of: Contribution | None = None
    shards: set[int] = field(default_factory=set)


class Arrivals:
    """The gradients that have not reached every shard yet; the oldest are dropped when there are too many."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._open: OrderedDict[Key, Arrival] = OrderedDict()

    def add(self, shard: int, key: Key, push: Arrival | None) -> Arrival | None:
        """Adds a shard's part; returns the arrival once it is complete."""
        arrival = self._open.get(key)
        if arrival is None:
            arrival = self._open[key] = Arrival()
        arrival.shards.add(shard)
        if push is not None:
            arrival.version, arrival.loss, arrival.finite = push.version, push.loss, push.finite
            arrival.settings, arrival.norm, arrival.track = push.settings, push.norm, push.track
            arrival.sample, arrival.of = push.sample, push.of
        while len(self._open) > REMEMBERED_ARRIVALS:
            self._open.popitem(last=False)
        if len(arrival.shards) < self._num_shards or arrival.version is None:
            return None
        del self._open[key]
        return arrival

    def drop(self, key: Key) -> None:
        """Forgets a gradient that will never be complete."""
        self._open.pop(key, None)

    def __repr__(self) -> str:
        return repr(self._open)
