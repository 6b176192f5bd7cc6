"""Assigns the batches of epochs to workers: which are free, which worker has which, which are part of the variables.

Owned by the thread of ps task 0 (and by tests). Pure like the quorum: it takes events (a worker takes batches, a gradient was
decided on, a worker is gone) and holds numbers only. Batch i of epoch e is number e * size + i; every worker knows its rows.
A batch is free, or leased to one incarnation of a worker for one of its local steps, or given (its gradient was accepted and
waits for its round), or done (its gradient is part of the variables, or never can be).

What always holds:
- a batch is in exactly one of these states, so it is part of at most one update;
- a batch whose gradient was refused, or whose worker is gone, is free again and the next to be assigned;
- a gradient from batches that were taken away from its worker does not count: `counts` is asked before the quorum.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchquorum.rules.quorum import Key

NEVER = 1 << 62


class WorkerLife(NamedTuple):
    """One incarnation of a worker."""

    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a worker that asks for batches.

    Attributes:
        numbers: The batches, in the order of use; none if all remaining ones are leased to others.
        over: Whether no batch will follow: every batch of all epochs is given or done, except those of workers that have
            nothing to compute either.
        void: Whether the worker was declared dead and its batches were reassigned; it must confirm that it dropped them.
    """

    numbers: tuple[int, ...] = ()
    over: bool = False
    void: bool = False


@dataclass(slots=True)
class _Holder:
    """The leases of one incarnation, as the local step of each batch; and its last request with the answer."""

    leases: dict[int, int] = field(default_factory=dict)
    floor: int = -1  # a gradient of a step up to here counts only if it has a lease
    request: int = -1
    answer: Grant = Grant()
    waiting: bool = False  # it has nothing to compute until it gets a batch


class Pool:
    """The batches of all epochs of one share of data.

    Args:
        size: How many batches an epoch has.
        epochs: How many epochs there are; None for no end.
        low: All batches below this number are done.
        done: Those above it that are done too.

    Attributes:
        again: How many leases came back, to be computed again.
        unusable: How many batches were given up because their gradient was not finite.
    """

    def __init__(self, size: int, epochs: int | None = None, low: int = 0, done: Iterable[int] = ()) -> None:
        self.size, self.epochs = size, epochs
        self._low, self._done = low, {n for n in done if n >= low}
        self._next = max(self._done, default=low - 1) + 1
        end = NEVER if epochs is None else size * epochs
        self._back = [n for n in range(low, min(self._next, end)) if n not in self._done]
        self._holders: dict[WorkerLife, _Holder] = {}
        self._given: dict[Key, tuple[int, ...]] = {}
        self.again = self.unusable = 0
        self._shrink()

    # -- events -------------------------------------------------------------------------------------------------------

    def take(
        self,
        life: WorkerLife,
        request: int,
        steps: Sequence[int],
        *,
        live: int = 1,
        void: int | None = None,
        idle: bool = False,
    ) -> Grant:
        """A worker asks for batches, one for each of these local steps; a repeated request gets the same answer.

        Near the end less is given than was asked for, so that nobody has many while others have none.

        Args:
            life: Who asks.
            request: Its number, growing.
            steps: The local steps for which batches are wanted, in order; the same several times for several batches.
            live: How many workers are alive.
            void: The worker holds nothing any more: whatever it had is free, and its gradients up to this local step count
                only if they were given before. That may be a step to come, computed from batches that are not its own.
            idle: The worker has nothing to compute until it is given something.
        """
        holder = self._holders.setdefault(life, _Holder())
        if request <= holder.request:
            return holder.answer if request == holder.request else Grant(void=True)
        if void is not None:
            self._free(holder)
            holder.floor = void
        if holder.floor == NEVER:
            return Grant(void=True)
        free = len(self._back) + (NEVER if self.epochs is None else max(0, self._total - self._next))
        count = min(len(steps), free, max(1, free // (2 * max(1, live))))
        numbers = tuple(self._pop() for _ in range(count))
        holder.leases.update(zip(numbers, steps, strict=False))
        holder.waiting = idle and not numbers
        nobody_computes = all(h.waiting or not h.leases for h in self._holders.values())
        holder.request, holder.answer = request, Grant(numbers, over=self._none_free and nobody_computes)
        return holder.answer

    def assign(self, life: WorkerLife, steps: Mapping[int, int]) -> bool:
        """A worker changes the local steps of its batches.

        Returns:
            False if one of them is not its own (any more).
        """
        holder = self._holders.get(life)
        if holder is None or holder.floor == NEVER or not steps.keys() <= holder.leases.keys():
            return False
        holder.leases.update(steps)
        return True

    def counts(self, key: Key) -> bool:
        """Whether a gradient may count: its worker still has its batches, or it has none."""
        holder = self._holders.get(WorkerLife(key.worker, key.incarnation))
        return holder is None or key.local_step > holder.floor or key.local_step in holder.leases.values()

    def decided(self, key: Key, *, accepted: bool, spent: bool = False) -> tuple[int, ...]:
        """A gradient was accepted or refused; `spent`: its batch would be refused again.

        Returns:
            The batches that it was computed from.
        """
        holder = self._holders.get(WorkerLife(key.worker, key.incarnation))
        if holder is None:
            return ()
        holder.waiting = False
        numbers = tuple(n for n, step in holder.leases.items() if step == key.local_step)
        for number in numbers:
            del holder.leases[number]
        # A worker's gradients are decided on in order, so no gradient of an earlier step can follow.
        for number in [n for n, step in holder.leases.items() if step < key.local_step]:
            del holder.leases[number]
            self._return(number)
        if accepted and numbers:
            self._given[key] = numbers
        elif spent:
            self.unusable += len(numbers)
            self._finish(numbers)
        else:
            for number in numbers:
                self._return(number)
        return numbers

    def applied(self, keys: Iterable[Key]) -> list[int]:
        """These gradients made an update: their batches are done. Returns the batches."""
        numbers = [n for key in keys for n in self._given.pop(key, ())]
        self._finish(numbers)
        return numbers

    def gone(self, life: WorkerLife, *, for_good: bool) -> None:
        """A worker died, left or was replaced: its leases are freed. If it may come back, it must confirm that it has none."""
        holder = self._holders.get(life)
        if holder is None:
            return
        self._free(holder)
        holder.floor = NEVER
        if for_good:
            del self._holders[life]

    # -- queries ------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether every batch of all epochs is given or done."""
        return self._none_free and not self.leased

    @property
    def leased(self) -> int:
        """Returns how many batches are leased."""
        return sum(len(h.leases) for h in self._holders.values())

    @property
    def done(self) -> tuple[int, list[int]]:
        """Returns the number below which all batches are done, and the done ones above it: all that a checkpoint needs."""
        return self._low, sorted(self._done)

    @property
    def used(self) -> int:
        """Returns how many batches are done."""
        return self._low + len(self._done)

    def is_void(self, life: WorkerLife, local_step: int) -> bool:
        """Whether the gradients of a worker after this local step do not count: its batches were reassigned."""
        holder = self._holders.get(life)
        return holder is not None and holder.floor > local_step

    # -- internals ----------------------------------------------------------------------------------------------------

    @property
    def _none_free(self) -> bool:
        return self.epochs is not None and self._next >= self._total and not self._back

    @property
    def _total(self) -> int:
        assert self.epochs is not None
        return self.size * self.epochs

    def _pop(self) -> int:
        if self._back:
            return heapq.heappop(self._back)
        self._next += 1
        return self._next - 1

    def _return(self, number: int) -> None:
        self.again += 1
        heapq.heappush(self._back, number)

    def _free(self, holder: _Holder) -> None:
        for number in holder.leases:
            self._return(number)
        holder.leases.clear()

    def _finish(self, numbers: Iterable[int]) -> None:
        self._done.update(numbers)
        self._shrink()

    def _shrink(self) -> None:
        while self._low in self._done:
            self._done.remove(self._low)
            self._low += 1
