"""Which workers give gradients with equal bits, round after round: they read the same batches, and all but one compute for nothing.

Owned by the decisions on ps task 0. Pure. A gradient comes with a checksum of a sample of it (`torchquorum.update.gradient_sample`). What
always holds: it is told once; one round alone says nothing, nor do gradients of zeros or without a checksum.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchquorum.rules.decisions import Key

ROUNDS = 4


class EqualGradients:
    """Compares the gradients of each round.

    Attributes:
        told: Whether workers were found; nothing is looked at any more.
    """

    def __init__(self) -> None:
        self.told = False
        self._samples: dict[Key, int] = {}
        self._running: dict[int, dict[tuple[int, int], int]] = {}  # of each track and pair of workers, the rounds

    def given(self, key: Key, sample: int, norm: float | None) -> None:
        """A gradient was accepted."""
        if not self.told and sample and norm:
            self._samples[key] = sample

    def applied(self, keys: Sequence[Key], track: int) -> tuple[int, ...]:
        """These gradients are an update; returns the workers that have given equal ones in several rounds running, once."""
        if self.told:
            return ()
        first: dict[int, int] = {}
        equal: dict[tuple[int, int], int] = {}
        before = self._running.get(track, {})
        for key in sorted(keys):
            sample = self._samples.pop(key, 0)
            other = first.setdefault(sample, key.worker) if sample else key.worker
            if other != key.worker:
                equal[other, key.worker] = before.get((other, key.worker), 0) + 1
        self._running[track] = equal
        found = {worker for pair, rounds in equal.items() if rounds >= ROUNDS for worker in pair}
        if found:
            self.told = True
            self._samples.clear()
            self._running.clear()
        return tuple(sorted(found))
