"""Several rules with the same workers, and the best number of workers to wait for.

Called by the command line and by the page. What always holds: the rules differ and nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchquorum.errors import ConfigError
from torchquorum.rules import parse_rule
from torchquorum.simulation.counts import Counts, Simulated, figures_of
from torchquorum.simulation.scenario import Scenario
from torchquorum.simulation.simulate import run_scenario

BACKUP = "backup"
_MOST = 24  # numbers of a sweep over backup workers


@dataclass(frozen=True, kw_only=True)
class SimulatedRule:
    """One rule of a sweep: its name as it was given, what happened, and the figures."""

    name: str
    counts: Counts
    figures: Simulated

    @property
    def aggregate(self) -> int | None:
        """Returns how many gradients an update takes, where each worker counts once and that number is fixed."""
        rule = self.counts.scenario.chosen_rule
        fixed = rule.once_per_round and not rule.auto
        return rule.needed(self.counts.scenario.workers) if fixed else None


def read_sweep(text: str, workers: int) -> list[str]:
    """Reads the rules of a sweep: rules with commas; `backup` stands for sync:K with K from half of the workers to all.

    Raises:
        ConfigError: One of them is no rule.
    """
    found: list[str] = []
    for part in (p.strip().lower().replace(" ", "") for p in text.strip().strip("'\"").split(",")):
        found += _backups(workers) if part == BACKUP else [part] if part else []
    found = list(dict.fromkeys(found))
    if not found:
        raise ConfigError(f"--sweep {text!r}: name at least one rule, such as sync,async, or {BACKUP}")
    for rule in found:
        parse_rule(rule, workers)
    return found


def _backups(workers: int) -> list[str]:
    """Returns sync:K for about two dozen K: every number of a few backup workers, larger steps for more of them."""
    spare, counts = workers // 2, list[int]()
    for backup in range(spare + 1):
        if not counts or backup >= counts[-1] + max(1, round((counts[-1] or 1) / 6)) or spare < _MOST:
            counts.append(backup)
    return [f"sync:{workers - b}" if b else "sync" for b in reversed(counts)]


def sweep(scenario: Scenario, rules: Sequence[str]) -> list[SimulatedRule]:
    """Simulates each rule with the same workers."""
    found = []
    for name in rules:
        counts = run_scenario(replace(scenario, rule=name))
        found.append(SimulatedRule(name=name, counts=counts, figures=figures_of(counts)))
    return found


def best_of(runs: Sequence[SimulatedRule]) -> SimulatedRule:
    """Returns the rule with the most progress per second; of equals the one with the most gradients per update."""
    return max(runs, key=lambda r: (r.figures.progress_per_s, r.figures.aggregate_mean))


def estimate_by_arrivals(run: SimulatedRule) -> list[float]:
    """Returns, for k = 1, 2, ..., the time to the same loss if k were waited for, as Chen et al. 2016 estimate it.

    The time of the k-th arrival of a round in which all are waited for, times the updates needed. It leaves out what a real run has:
    a worker that was not waited for is still busy with its old gradient when the next round begins.
    """
    noise = run.counts.scenario.noise
    worth = (k if noise is None else k / (k + noise) for k in range(1, len(run.figures.arrivals_s) + 1))
    return [seconds / w for seconds, w in zip(run.figures.arrivals_s, worth, strict=False)]
