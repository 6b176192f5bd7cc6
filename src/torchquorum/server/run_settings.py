"""The run's settings: the options of the optimizer's parameter groups, as the log has them, and a change that waits for its update.

Owned by the leader. The chief's program changes them, or, while the chief is dead, that of the worker that stands in: they come with its
pushes. What always holds: a change that has arrived is in the next `Apply` of the log, whatever becomes of the gradient that brought it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchquorum.wire.settings import Settings, changes, with_rates


class RunSettings:
    """The settings of one run.

    Attributes:
        now: Those of the last update in the log.
    """

    def __init__(self, settings: Settings) -> None:
        self.now = self._wanted = settings

    def check(self, settings: Settings) -> None:
        """Raises ValueError unless a worker's settings, if it has sent some, can be those of this run."""
        if not settings:
            return
        if [sorted(group) for group in settings] != [sorted(group) for group in self.now]:
            raise ValueError("settings of other parameter groups, or of another optimizer, than the run has")
        for ours, theirs in zip(self.now, settings, strict=True):
            for name, value in theirs.items():
                if not _fits(value, ours[name]):
                    raise ValueError(f"{name}={str(value)[:80]} instead of {ours[name]}: not a value of that kind")

    def offer(self, settings: Settings) -> None:
        """The program of the worker that leads has these; they hold from the next update on."""
        self._wanted = settings

    def offer_rates(self, rates: Sequence[float]) -> None:
        """An update was made with these learning rates on the fast path."""
        self._wanted = with_rates(self._wanted, rates)

    @property
    def pending(self) -> bool:
        """Whether the next update brings a change."""
        return self._wanted is not self.now and self._wanted != self.now

    def take(self) -> Settings:
        """An update is made: returns what changes with it."""
        if self._wanted is self.now:
            return []
        change, self.now = changes(self.now, self._wanted), self._wanted
        return change


def _fits(value: Any, before: Any) -> bool:
    """Whether an option may have this value, given the one it had."""
    if isinstance(before, list):
        return isinstance(value, list) and len(value) == len(before) and all(map(_fits, value, before))
    if isinstance(value, dict):
        return _is_number(value.get("tensor")) and isinstance(
            getattr(torch, str(value.get("dtype")), None), torch.dtype
        )
    if _is_number(before) or isinstance(before, dict):
        return _is_number(value)
    return value is None or isinstance(value, bool | int | float | str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
