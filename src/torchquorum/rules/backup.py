"""Chooses how many gradients to wait for: `Sync(aggregate="auto")`.

Owned by the quorum. The method is that of dynamic backup workers (Xu, Neglia and Sebastianelli 2020, Dynamic backup workers for
parallel machine learning): wait for the k that maximizes gain(k) / T(k), where T(k) is the expected time of a round that closes with
its k-th gradient. Two things differ. They estimate T(k) from rounds in which k were waited for; here T(k) comes from the times
of single steps, by playing rounds in miniature, so a number that was never tried has an estimate, and a worker that was not
waited for is busy with its old gradient when a round begins, as in a run. They estimate the gain from the variance of gradients;
the quorum sees none, so the gain is k / (k + noise) with a `noise` that the user gives: the updates that are needed are as
1 + noise / k (McCandlish et al. 2018). With noise unknown the gain is k.

What always holds: the choice is never below the floor; it follows from the events alone, so every replay of the same events makes
the same choices; a choice costs as much as some hundred gradients at most, and is made every 32 to 128 rounds, or when speeds change.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from torchquorum.rules.times import StepTimes, quantile

WARM = 4  # steps of each worker before the first choice
EVERY = 32  # rounds from one choice to the next, at first; doubled while the choice stays
MOST_ROUNDS_BETWEEN = 128
BETTER = 1.02  # a new number must promise this much more, so that chance does not move it
LATE = 4.0  # a round that takes so many times as long as expected is looked at before it ends
MINIATURE = 64  # a larger cluster is played with so many of its workers
CHANGED = 16  # when one of so many workers has changed its speed, it is time to choose again


class BackupChooser:
    """The choice and what it is made from.

    Attributes:
        times: The workers' times; the quorum tells it what happens.
        round_s: The expected time of a round with the number that was chosen last; None before the first choice.
    """

    def __init__(self, noise: float | None) -> None:
        self.times = StepTimes()
        self.round_s: float | None = None
        self._noise = noise
        self._wait, self._next_version = EVERY, 0
        self._changes = 0  # of speeds, when the choice was made
        self._looked_at = -math.inf

    def is_due(self, version: int, live: Sequence[int]) -> bool:
        """Whether it is time to choose again, at the end of a round."""
        if self.round_s is None:
            return all(self.times.known(i) >= WARM for i in live)
        changes = self.times.changes - self._changes
        return version >= self._next_version or CHANGED * changes > len(live)

    def is_late(self, began_at: float, now: float) -> bool:
        """Whether an open round takes so much longer than expected that it must be looked at; True once per doubling."""
        if self.round_s is None or now - began_at <= LATE * self.round_s:
            return False
        if self._looked_at > began_at and now - began_at < 2.0 * (self._looked_at - began_at):
            return False
        self._looked_at = now
        return True

    def choose(self, live: Sequence[int], floor: int, current: int, version: int, now: float) -> int:
        """Returns how many of the live workers to wait for; at least `floor`."""
        samples = self._samples(live, now)
        if not samples or floor >= len(live):
            return max(floor, len(live))
        scale = len(live) / len(samples)  # how many workers one of the miniature stands for: those around it, by speed
        played: dict[int, float] = {}

        def round_s(k: int) -> float:
            part = k if scale == 1 else min(len(samples), math.ceil(k / scale + 0.5))
            if part not in played:
                played[part] = play_rounds(samples, part)
            return played[part]

        def rate(k: int) -> float:
            return self.gain(k) / round_s(k)

        best = search(rate, floor, len(live))
        current = min(max(current, floor), len(live))
        chosen = best if rate(best) > BETTER * rate(current) else current
        self._wait = min(2 * self._wait, MOST_ROUNDS_BETWEEN) if chosen == current else EVERY
        self._next_version, self._changes = version + self._wait, self.times.changes
        self.round_s = round_s(chosen)
        return chosen

    def gain(self, k: int) -> float:
        """Returns what an update of k gradients is worth."""
        return float(k) if self._noise is None else k / (k + self._noise)

    def _samples(self, live: Sequence[int], now: float) -> list[list[float]]:
        """Returns what the next steps of each worker may take; of a large cluster, those of evenly chosen workers.

        A worker of which nothing is known is taken for a typical one.
        """
        found = [expected for i in live if (expected := self.times.expected(i, now))]
        if not found:
            return []
        usual = [quantile([quantile(e, 0.5) for e in found], 0.5)]
        found += [usual] * (len(live) - len(found))
        if len(found) > MINIATURE:
            found.sort(key=lambda e: quantile(e, 0.5))
            found = [found[(2 * i + 1) * len(found) // (2 * MINIATURE)] for i in range(MINIATURE)]
        return found


def play_rounds(samples: Sequence[Sequence[float]], k: int) -> float:
    """Returns the mean time of a round that closes with its k-th gradient, where worker i takes samples[i] in turn.

    A worker whose gradient came too late for its round begins another when it has ended it, at the version of then.
    """
    now, version, made = 0.0, 0, [0] * len(samples)
    rounds = max(16, 256 // len(samples))
    ready = sorted((own[0], i, 0) for i, own in enumerate(samples))  # a heap
    given: list[int] = []
    while version < rounds:
        now, i, computed_at = heapq.heappop(ready)
        if computed_at < version:
            go_on = [i]  # too late for its round
        else:
            given.append(i)
            if len(given) < k:
                continue
            version += 1
            go_on, given = given, []
        for worker in go_on:
            made[worker] += 1
            own = samples[worker]
            heapq.heappush(ready, (now + own[made[worker] % len(own)], worker, version))
    return max(now / rounds, 1e-9)


def search(rate: Callable[[int], float], low: int, high: int) -> int:
    """Returns the best number: all are tried if they are few; else ever larger steps from `high` down, then between the best."""
    tried = sorted({high - b for b in _steps(high - low)})
    best = max(tried, key=lambda k: (rate(k), k))
    while True:
        place = tried.index(best)
        around = [(tried[j] + best) // 2 for j in (place - 1, place + 1) if 0 <= j < len(tried)]
        new = [k for k in around if k not in tried]
        if not new:
            return best
        tried = sorted([*tried, *new])
        best = max(tried, key=lambda k: (rate(k), k))


def _steps(span: int) -> list[int]:
    """Returns 0, 1, 2, 3, 4, 6, 8, 12, ... up to the span, and the span."""
    found, step = [0], 1
    while found[-1] < span:
        found.append(min(span, found[-1] + step))
        step = max(1, found[-1] // 2)
    return found
