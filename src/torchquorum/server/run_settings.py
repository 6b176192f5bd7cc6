"""The run's settings: the options of the optimizer's parameter groups, as the log has them, and a change that waits for its update.

Owned by the leader. The chief's program changes them, or, while the chief is dead, that of the worker that stands in: they come with its
pushes. What always holds: a change that has arrived is in the next `Apply` of the log, whatever becomes of the gradient that brought it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchquorum.wire.messages import Plan
from torchquorum.wire.settings import RATE, Settings, changes, decode, is_like, with_rates


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
                if not is_like(value, ours[name]):
                    raise ValueError(f"{name}={str(value)[:80]} instead of {ours[name]}: not a value of that kind")

    def offer(self, settings: Settings) -> None:
        """The program of the worker that leads has these; they hold from the next update on."""
        self._wanted = settings

    def offer_rates(self, rates: Sequence[float]) -> None:
        """An update was made with these learning rates on the fast path."""
        self._wanted = with_rates(self._wanted, rates)

    @property
    def rates(self) -> list[float]:
        """Returns the learning rate of each parameter group in the next update."""
        return [float(decode(group.get(RATE, 0.0))) for group in self._wanted]

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


def resumed(plan: Plan, saved_plan: Mapping[str, Any], saved: Settings | None) -> Settings:
    """Returns the settings with which a run goes on from a checkpoint: as saved, but where the program now gives others than it did then.

    Args:
        plan: The run's plan, as the program gives it now.
        saved_plan: The plan that is in the checkpoint.
        saved: The settings that are in the checkpoint; None in one of before they were saved.
    """
    scheduled = (RATE,) if plan.schedule is not None else ()  # a schedule's rates follow from the step
    given = [{k: v for k, v in group.items() if k not in scheduled} for group in plan.optimizer.groups]
    before = saved_plan.get("optimizer", {}).get("groups", [])
    if saved is None or not len(saved) == len(before) == len(given):
        return given
    return [
        {name: there[name] if name in there and was.get(name) == value else value for name, value in now.items()}
        for now, was, there in zip(given, before, saved, strict=True)
    ]
