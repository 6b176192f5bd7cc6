"""What is simulated: the rule, the workers, their times, the network, and what goes wrong.

Built by `tq.simulate` and by the command line. What always holds: a scenario that was built can be simulated; everything random
in it follows from its seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchquorum.errors import ConfigError
from torchquorum.rules import Rule, parse_rule
from torchquorum.rules.quorum import LIVENESS_S
from torchquorum.simulation.network import Network
from torchquorum.simulation.step_times import DrawnTimes, parse_times

UPDATES = 1000


@dataclass(frozen=True)
class SlowDown:
    """From `at_s` on, these workers take so many times as long for a step; 1 is their own speed again."""

    at_s: float
    factors: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A cluster and a rule to be simulated. It ends at the first of `updates`, `gradients` and `seconds`.

    Attributes:
        rule: A rule, or its text, such as sync:9of10.
        workers: How many workers there are; with `arrive_s`, how many there can be.
        times: Where step times come from: a distribution, its text (see `parse_times`), or seconds.
        updates: How many updates to make; 1,000 if no end is given.
        gradients: How many gradients to compute at most.
        seconds: How much virtual time to simulate at most.
        start: How many workers are there at the beginning; None for all.
        arrive_s: Mean seconds between two arrivals, while places are free; arrivals are a Poisson process.
        fail_s: Mean seconds from the start of a worker to its failure, exponentially distributed; None for no failures.
        restart_s: Seconds until a worker that failed is back; None if it does not come back.
        notice_s: Seconds until a failure is noticed: at once by the ps's own host, `liveness_s` elsewhere.
        slow: Which workers are slower than the times say, and from when on; a mapping is for the whole run.
        network: What lies between workers and ps tasks.
        batch_size: Examples per gradient.
        noise: How many gradients it takes until the mean of more of them helps little (the gradient noise scale, in gradients;
            McCandlish et al. 2018): the updates needed are as 1 + noise / k. None: every gradient helps as much as every other.
        seed: Of everything random.
    """

    rule: Rule | str
    workers: int
    times: DrawnTimes | str | float
    updates: int | None = None
    gradients: int | None = None
    seconds: float | None = None
    start: int | None = None
    arrive_s: float | None = None
    fail_s: float | None = None
    restart_s: float | None = None
    notice_s: float = LIVENESS_S
    slow: Sequence[SlowDown] | Mapping[int, float] = ()
    network: Network = field(default_factory=Network)
    batch_size: int = 1
    noise: float | None = None
    seed: int = 0

    chosen_rule: Rule = field(init=False, repr=False)
    step_times: DrawnTimes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.updates is None and self.gradients is None and self.seconds is None:
            object.__setattr__(self, "updates", UPDATES)
        self._check_numbers()
        if self.start is not None and not 1 <= self.start <= self.workers:
            raise ConfigError(f"start={self.start}: must be from 1 to the {self.workers} workers")
        if self.start not in (None, self.workers) and self.arrive_s is None:
            raise ConfigError(f"start={self.start}: give arrive_s= too, or the other workers never come")
        if self.restart_s is not None and self.fail_s is None:
            raise ConfigError(f"restart_s={self.restart_s}: no worker fails; give fail_s= too")
        for worker, factor in ((w, f) for change in self.slow_downs for w, f in change.factors.items()):
            if not 0 <= worker < self.workers or not (factor > 0 and math.isfinite(factor)):
                last = self.workers - 1
                raise ConfigError(f"slow: worker {worker}, {factor} times: must be worker 0 to {last}, above 0 times")
        rule = parse_rule(self.rule, self.workers) if isinstance(self.rule, str) else self.rule
        if rule.auto and rule.noise is None and self.noise is not None:
            rule = replace(rule, noise=self.noise)
        object.__setattr__(self, "chosen_rule", rule)
        times = str(self.times) if isinstance(self.times, int | float) else self.times
        object.__setattr__(self, "step_times", parse_times(times) if isinstance(times, str) else times)

    def _check_numbers(self) -> None:
        at_least_one, above_zero = ("workers", "updates", "gradients", "batch_size"), ("seconds", "arrive_s", "fail_s")
        for name in (*at_least_one, *above_zero, "restart_s", "notice_s", "noise"):
            value = getattr(self, name)
            if value is None:
                continue
            if name in at_least_one and value < 1:
                raise ConfigError(f"{name}={value}: must be 1 or more")
            if name in above_zero and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value}: must be a number above 0; leave it out for none")
            if not value >= 0:
                raise ConfigError(f"{name}={value}: must be 0 or more")

    @property
    def slow_downs(self) -> list[SlowDown]:
        """Returns when which workers become slower, in order."""
        if isinstance(self.slow, Mapping):
            return [SlowDown(0.0, self.slow)] if self.slow else []
        return sorted(self.slow, key=lambda s: s.at_s)
