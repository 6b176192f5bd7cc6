"""Dynamic backup workers in real runs: the time to a given loss, beside every fixed number of gradients.

    python benchmarks/backup.py [--case slow|changes] [--problem points|mnist] [--workers 6] [--least 3] [--rounds 3]

Workers are real processes that sleep a lognormal time per step, one of them three times as long, so what is measured are the waits of the
rule and not the cores of the machine. All numbers take turns, round by round, with the same times. `points`: the mean of noisy points at
a rate of 1/t, where an update of k gradients is worth k. `mnist`: softmax at a constant rate, where one of few is worth nearly as much.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import torchquorum as tq
from torchquorum.data.mnist import load_mnist
from torchquorum.rules import parse_rule

NUMBERS, SLOWER, CHANGE_EVERY_S, AT_MOST_S = 4000, 3.0, 10.0, 90.0


@dataclass(frozen=True)
class Trial:
    """One run."""

    rule: str
    problem: str
    case: str
    seed: int
    target: float
    folder: str


class Points:
    """The mean of noisy points."""

    def __init__(self, seed: int) -> None:
        self.model = nn.Linear(NUMBERS, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.lr, self._draw = (lambda step: 1.0 / (step + 1)), torch.Generator().manual_seed(seed)

    def loss(self) -> torch.Tensor:
        """Returns the loss of a new point."""
        return 0.5 * ((self.model.weight[0] - 1.0 - torch.randn(NUMBERS, generator=self._draw)) ** 2).sum()

    def reached(self) -> float:
        """Returns how far the variables are from the best."""
        return float(((self.model.weight.detach() - 1.0) ** 2).mean())


class Softmax:
    """MNIST, batches of ten."""

    def __init__(self, seed: int) -> None:
        self.model, self.lr = nn.Linear(784, 10), lambda step: 0.1
        nn.init.zeros_(self.model.weight)
        self._inputs, self._targets = load_mnist().train.tensors()
        self._draw = torch.Generator().manual_seed(seed)

    def loss(self) -> torch.Tensor:
        """Returns the loss of a new batch."""
        rows = torch.randint(0, len(self._inputs), (10,), generator=self._draw)
        return nn.functional.cross_entropy(self.model(self._inputs[rows]), self._targets[rows])

    def reached(self) -> float:
        """Returns the loss on 1000 images."""
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.model(self._inputs[:1000]), self._targets[:1000]))


def train(trial: Trial) -> tuple[float, float]:
    """Runs one worker; returns when it began and when it reached the loss, NaN if another did."""
    task = tq.join()
    torch.manual_seed(trial.seed)
    problem = (Points if trial.problem == "points" else Softmax)(1000 * trial.seed + task.index)
    draw, done = random.Random(f"{trial.seed}/{task.index}"), Path(trial.folder, "done")
    optimizer = tq.Optimizer(
        torch.optim.SGD(problem.model.parameters(), lr=1.0), parse_rule(trial.rule, task.num_workers)
    )
    with tq.Session(
        task, problem.model, optimizer, max_seconds=AT_MOST_S, wait_for_workers=task.num_workers
    ) as session:
        began = time.time()
        while not session.should_stop() and not done.exists():
            if session.global_step and problem.reached() < trial.target:
                done.touch()
                return began, time.time()
            optimizer.param_groups[0]["lr"] = problem.lr(session.global_step)
            optimizer.zero_grad()
            loss = problem.loss()
            loss.backward()
            at = int((time.time() - began) / CHANGE_EVERY_S) if trial.case == "changes" else -1
            slower = SLOWER if task.index == at % task.num_workers else 1.0
            time.sleep(slower * draw.lognormvariate(math.log(0.08), 0.4))
            optimizer.step(loss=float(loss))
    return began, math.nan


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="slow", choices=["slow", "changes"])
    parser.add_argument("--problem", default="points", choices=["points", "mnist"])
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--least", type=int, default=3, help="the lowest fixed number")
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    target = 1 / 900 if flags.problem == "points" else 0.55
    rules = [*(f"sync:{k}" for k in range(flags.least, flags.workers)), "sync", "sync:auto"]
    seconds: dict[str, list[float]] = {rule: [] for rule in rules}
    for seed in range(flags.rounds):
        for rule in rules:
            with tempfile.TemporaryDirectory() as folder:
                trial = Trial(rule, flags.problem, flags.case, seed, target, folder)
                found = tq.launch(train, trial, workers=flags.workers, quiet=True)
            ended = [at for _, at in found if not math.isnan(at)]
            seconds[rule].append(min(ended) - max(began for began, _ in found) if ended else math.inf)
            print(f"round {seed + 1}: {rule} {seconds[rule][-1]:.2f} s", flush=True)
    means = {rule: statistics.mean(of) for rule, of in seconds.items()}
    best = min(mean for rule, mean in means.items() if rule != "sync:auto")
    for rule, mean in means.items():
        print(f"{rule:10} {mean:6.1f} s, {best / mean:.2f} of the best fixed number", flush=True)


if __name__ == "__main__":
    main()
