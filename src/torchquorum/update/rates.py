"""The learning rates of a shard's updates: as the parameter groups of its optimizer say, or as a schedule sets them.

Owned by the updater. What always holds: `now` are the rates of the next update, also where the schedule is ahead of it because workers that
make updates by themselves have asked for later ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchquorum.update import optimizers, schedules
from torchquorum.wire.messages import ScheduleSpec
from torchquorum.wire.settings import RATE


class Rates:
    """The learning rate of each parameter group.

    Args:
        optimizer: Has the parameter groups.
        schedule: Sets their rates, if there is one.

    Attributes:
        scheduled: Whether a schedule sets them.
        used: Those of the last update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleSpec | None) -> None:
        self._optimizer = optimizer
        self._schedule = schedules.build(schedule, optimizer) if schedule else None
        self.scheduled = self._schedule is not None
        self._from_now = [self._current()]  # of the next update, and of those after it that were asked for
        self.used = self.now

    @property
    def now(self) -> list[float]:
        """Returns those of the next update."""
        return self._from_now[0]

    def ahead(self, update: int) -> list[float] | None:
        """Returns those of the update that comes `update` updates after the next one.

        None if the schedule does not go that far, as OneCycleLR beyond its last step, or fails: the ps meets that at that update.
        """
        try:
            while len(self._from_now) <= update:
                self._from_now.append(self._next())
        except Exception:
            return None
        return self._from_now[update]

    def changed(self) -> None:
        """The program has written other rates into the parameter groups; with a schedule these do not count."""
        if not self.scheduled:
            self._from_now = [self._current()]

    def advance(self) -> None:
        """An update was made."""
        self.used = self.now
        if len(self._from_now) == 1:
            self._from_now.append(self._next())
        del self._from_now[0]

    def begin_at(self, version: int) -> None:
        """So many updates had been made: the schedule is brought to that step."""
        if self._schedule is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer's steps were made before the restart
                for _ in range(version):
                    self._schedule.step()
        self._from_now = [self._current()]
        self.used = self.now

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """Inside this block the parameter groups have the rates of the next update, also where the schedule is ahead."""
        if len(self._from_now) == 1:
            yield
            return
        groups, ahead = self._optimizer.param_groups, self._current()
        for group, rate in zip(groups, self.now, strict=True):
            group[RATE] = rate
        yield
        for group, rate in zip(groups, ahead, strict=True):
            group[RATE] = rate

    def _next(self) -> list[float]:
        if self._schedule is not None:
            with optimizers.of_the_program():
                self._schedule.step()
        return self._current()

    def _current(self) -> list[float]:
        return [float(group[RATE]) for group in self._optimizer.param_groups]
