"""A sampler for DataLoaders that gives every worker its part of a data set, with a new order in every epoch.

Made by the program from its task; `session.epochs` tells it the epoch and among whom the data is divided. What always holds: the order is a
pure function of (seed, epoch), the same as DistributedSampler's; the workers' parts have every row once, and differ by one row at most.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sized
from typing import Protocol

import torch
from torch.utils.data import Sampler as TorchSampler

from torchquorum.errors import ConfigError


class _Task(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def num_workers(self) -> int: ...


class Sampler(TorchSampler[int]):
    """The rows of this worker, for `DataLoader(dataset, sampler=tq.data.Sampler(dataset, task))`.

    As torch's DistributedSampler, but no row is repeated to make the parts equal: workers may have different numbers of batches. In a loop
    over `session.epochs` the epoch is set by itself, and the data is divided among the workers that are alive when an epoch begins.

    Args:
        dataset: Anything with a length, the same on every worker.
        task: What `tq.join()` returned.
        shuffle: Whether every epoch has its own order.
        seed: Of the order; the same on every worker.
        drop_last: Leave out the rows that do not give every worker one more.
    """

    def __init__(
        self, dataset: Sized, task: _Task, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"tq.data.Sampler({type(dataset).__name__}): it has no length; a stream is divided by the program, by task.index and "
                "task.num_workers"
            )
        if not hasattr(task, "num_workers"):
            raise ConfigError(
                f"tq.data.Sampler(dataset, {type(task).__name__}): the second is the task that tq.join() returned"
            )
        self._dataset, self._shuffle, self._seed, self._drop_last = dataset, shuffle, seed, drop_last
        self.task, self.epoch = task, 0
        self._part, self._parts = task.index, max(1, task.num_workers)
        _ALL.add(self)

    def set_epoch(self, epoch: int) -> None:
        """Goes to an epoch, whose order follows; `session.epochs` does this."""
        self.epoch = epoch

    def divide(self, part: int | None, parts: int) -> None:
        """Gives this worker another part of the data; None for nothing of it."""
        self._part, self._parts = -1 if part is None else part, parts

    def __iter__(self) -> Iterator[int]:
        rows = len(self._dataset)
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed(self._seed + self.epoch)
            order = torch.randperm(rows, generator=generator).tolist()
        else:
            order = list(range(rows))
        if self._drop_last:
            order = order[: rows - rows % self._parts]
        return iter(order[self._part :: self._parts] if self._part >= 0 else ())

    def __len__(self) -> int:
        rows = len(self._dataset)
        if self._part < 0:
            return 0
        return rows // self._parts if self._drop_last else len(range(self._part, rows, self._parts))


_ALL: weakref.WeakSet[Sampler] = weakref.WeakSet()


def samplers_of(task: object) -> list[Sampler]:
    """Returns the samplers that were made from a task and are in use."""
    return [sampler for sampler in _ALL if sampler.task is task]
