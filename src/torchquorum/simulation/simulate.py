"""`tq.simulate`: the figures of one scenario.

The public entrance of this folder. The page and the sweeps of the command line call `run_scenario`.
"""

from __future__ import annotations

from typing import Any

from torchquorum.rules import Rule
from torchquorum.simulation.counts import Counts, Simulated, figures_of
from torchquorum.simulation.scenario import Scenario
from torchquorum.simulation.simulator import Simulator
from torchquorum.simulation.step_times import DrawnTimes


def simulate(rule: Rule | str, workers: int, times: DrawnTimes | str | float = 1.0, **more: Any) -> Simulated:
    """Tells what a rule would do with these workers: the quorum of a real run decides, in virtual time.

    Example:
        >>> tq.simulate("sync:9of10", 10, "exponential:0.1", updates=500).updates_per_s

    Args:
        rule: The rule, or its text as on the command line.
        workers: How many workers there are.
        times: Step times: seconds, or a distribution as text, such as `lognormal:0.1:0.5` or `trace:FILE`.
        **more: Any other attribute of `tq.types.Scenario`: the end (`updates=`, `gradients=`, `seconds=`), `slow=`, `network=`,
            `fail_s=`, `restart_s=`, `arrive_s=`, `noise=`, `batch_size=`, `seed=`.

    Returns:
        Updates per second, staleness, waiting and refused work by cause, and more.

    Raises:
        ConfigError: The scenario cannot be.
    """
    return figures_of(run_scenario(Scenario(rule=rule, workers=workers, times=times, **more)))


def run_scenario(scenario: Scenario) -> Counts:
    """Simulates a scenario to its end."""
    return Simulator(scenario).run()
