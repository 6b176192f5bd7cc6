"""One optimizer's part of the quorum: its rule, its version, the round that is open, and where each worker stands in it.

Owned by the quorum, which is one for all tracks of a run and knows who is alive; a run of one optimizer has one track. What always
holds: a round has gradients of this track only; the counts here follow from what the quorum has told.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torchquorum.rules.backup import BackupChooser
from torchquorum.rules.decisions import Key
from torchquorum.rules.grace import Grace
from torchquorum.rules.presets import Rule
from torchquorum.rules.times import StepTimes


@dataclass(slots=True)
class Standing:
    """Where a worker stands in a track.

    `clock` measures its lead: it counts its gradients, but starts level with the slowest live worker when it joins or comes back,
    so that no worker waits for it to catch up. `gave_at` is the version whose round has its gradient, `local_step` the last one that
    was decided on.
    """

    clock: int
    gave_at: int = -1
    local_step: int = 0


@dataclass(slots=True)
class Track:
    """The state of one optimizer.

    Attributes:
        index: Which of the run's optimizers it is.
        rule: When gradients become an update.
        num_workers: The number of workers in the cluster.
        version: The number of applied updates.
        round: The gradients of the open round, in order of arrival.
        held: The workers that have pushed here and are not released.
        needed: How many gradients make one update.
        chooser: Chooses `needed`, where the rule says "auto".
        grace: Keeps a round open that has enough, where the rule says so.
        round_began: When the open round was opened.
        slowest: The slowest clock when waiting workers were last checked.
    """

    index: int
    rule: Rule
    num_workers: int
    version: int = 0
    round: list[Key] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    needed: int = field(init=False)
    chooser: BackupChooser | None = field(init=False, default=None)
    grace: Grace | None = field(init=False, default=None)
    round_began: float = 0.0
    slowest: int = 0
    _clocks: Counter[int] = field(default_factory=Counter)  # how many live workers are at each clock
    _low: int = 0  # the slowest clock when it was last asked for

    def __post_init__(self) -> None:
        self.needed = self.rule.needed(self.num_workers)
        self.chooser = BackupChooser(self.rule.noise) if self.rule.auto else None
        if self.rule.grace is not None:
            self.grace = Grace(None if self.rule.grace == "auto" else float(self.rule.grace))

    @property
    def times(self) -> StepTimes | None:
        """Returns the workers' times, where something is chosen by them."""
        if self.chooser is not None:
            return self.chooser.times
        return self.grace.times if self.grace is not None else None

    def is_late(self, now: float) -> bool:
        """Whether the open round takes so long that the number of gradients has to be chosen again."""
        return self.chooser is not None and self.chooser.is_late(self.round_began, now)

    def is_over_grace(self, now: float) -> bool:
        """Whether the open round has enough gradients, and has been kept open for long enough."""
        return self.grace is not None and self.grace.is_over(now)

    def tick(self, place: Standing) -> None:
        """A counted worker has given a gradient."""
        self.count_clock(place.clock, -1)
        place.clock += 1
        self.count_clock(place.clock, 1)

    def count_clock(self, clock: int, change: int) -> None:
        """A live worker is at this clock from now on, or is not any more."""
        self._clocks[clock] += change
        if not self._clocks[clock]:
            del self._clocks[clock]

    def slowest_clock(self) -> int:
        """Returns the clock of the slowest live worker, which only grows: nobody joins or comes back below it."""
        if self._low not in self._clocks:
            self._low = self._low + 1 if self._low + 1 in self._clocks else min(self._clocks, default=self._low)
        return self._low

    def has_given(self, place: Standing) -> bool:
        """Whether a worker has given its one gradient to the open round."""
        return self.rule.once_per_round and place.gave_at == self.version

    def is_ahead(self, place: Standing, slowest: int) -> bool:
        """Whether a worker is further ahead of the slowest than the rule allows."""
        return self.rule.max_lead is not None and place.clock - slowest > self.rule.max_lead
