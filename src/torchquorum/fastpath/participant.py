"""One worker as a user of the page: what turns and rounds have in common.

Owned by the worker's thread. What always holds: a wait ends with what was waited for, in the same opening of the page, or with False
after `wait_s`, when the page is closed, or when a frozen process holds the lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchquorum.clock import SYSTEM, Clock
from torchquorum.fastpath.page import OPEN, FastPage
from torchquorum.fastpath.stages import Stage, Stages
from torchquorum.memory.slots import Slots
from torchquorum.update.kernels import Moment

WAIT_S = 0.2  # with a core for each worker: after a longer wait the ps is asked, which can say who is waited for
SPIN_S = 0.0005


def usable_cores() -> int:
    """Returns on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class UpdateSlots(NamedTuple):
    """Where an update reads and writes: the slots of the current version and of the next, and those of their state."""

    current: int
    target: int
    state: int = 0
    state_target: int = 0


class MadeVersion(NamedTuple):
    """A version that was made on the fast path.

    Attributes:
        met: The version that it was made from.
        version: Its number.
        slot: Where it lies.
        rates: The learning rates of the next update, as far as they are known.
        used: Those that it was made with.
        loaded: The parameters hold it already.
        reading: A GPU may still be reading its slot.
    """

    met: int
    version: int
    slot: int
    rates: list[float]
    used: list[float]
    loaded: bool = False
    reading: bool = False


class Participant:
    """One incarnation of a worker on the page.

    Args:
        page: The ps's page.
        worker: Which worker this is.
        incarnation: Its life.
        versions: The ps's slots.
        cores: How many cores the workers share; by default those of this process.
        wait_s: How long to wait for another worker; by default `WAIT_S` for each worker per core.
        clock: Tells the time.
    """

    def __init__(
        self,
        page: FastPage,
        worker: int,
        incarnation: int,
        versions: Slots,
        *,
        cores: int | None = None,
        wait_s: float | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.page, self.worker, self.versions = page, worker, versions
        self._incarnation, self._clock = incarnation, clock
        self.cores = cores or usable_cores()
        self.wait_s = WAIT_S * max(1, -(-page.num_workers // self.cores)) if wait_s is None else wait_s
        self.spins = page.num_workers <= self.cores  # else the worker that is waited for may need this core

    def may_step(self) -> bool:
        """Whether this worker may make the next version; under the lock."""
        page, words, version = self.page, self.page.words, self.page.version
        return (
            words.state == OPEN
            and page.workers.tokens[self.worker] == self._incarnation
            and version < words.limit
            and version + 1 < page.rates.known
            and page.records.room >= page.num_workers
        )

    def own_rates(self, rates: Sequence[float] | None) -> Sequence[float] | None:
        """Returns the learning rates of this worker's program, if it has some and they count; under the lock."""
        return rates if self.page.words.lead == self.worker and self.page.rates.held else None

    def still_in(self, opening_id: int) -> bool:
        """Whether the page is open and was not closed since an opening; under the lock."""
        return self.page.words.state == OPEN and self.page.words.opening_id == opening_id

    def free_slot(self, current: int) -> int:
        """Returns a slot that no worker uses; under the lock."""
        busy, slot = self.page.workers.busy_slots(), 0
        while slot == current or slot in busy:
            slot += 1
        assert slot < len(self.versions), "there is a slot more than workers can use"
        return slot

    def free_state(self, current: int) -> int:
        """Returns a slot of optimizer state that no worker writes; under the lock."""
        busy = {current, *self.page.workers.busy_states()}
        return next(slot for slot in range(len(busy) + 1) if slot not in busy)

    def moments(self, update: int, rates: Sequence[float]) -> list[Moment]:
        """Returns, of each parameter group, which update number `update` is for its state."""
        return [Moment(rate, update + steps) for rate, steps in zip(rates, self.page.steps, strict=True)]

    def until(self, reached: Callable[[], bool], opening_id: int) -> Stages[bool]:
        """Waits until something holds in an opening; its result is False if the page was closed meanwhile, or the wait was too long."""
        page, words, now = self.page, self.page.words, self._clock.now
        started = now()
        while not reached():
            waited = now() - started
            if words.state != OPEN or words.opening_id != opening_id or waited > self.wait_s:
                break
            if self.spins and waited < SPIN_S:
                yield Stage.SPIN
            elif not (yield from page.wait_stages(reached, self.wait_s)):
                return False
        # In another opening the same version may lie elsewhere: the ps has finished what the workers had begun.
        return reached() and words.opening_id == opening_id

    def done(self) -> None:
        """This worker has finished with the slots that it wrote or read; needs no lock."""
        self.page.workers.uses[self.worker] = self.page.workers.state_uses[self.worker] = -1
