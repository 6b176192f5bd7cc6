"""`torchquorum compare`: trains the built-in job with several rules on the same budget, or compares existing runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from torchquorum.cli.command import Command, Named, option
from torchquorum.cli.live_view import View
from torchquorum.cli.run_folder import run_folder_names
from torchquorum.cli.train import DEFAULTS, SLOW, check_workers, job_cluster, run_job
from torchquorum.cluster.flags import TRANSPORTS
from torchquorum.errors import ConfigError
from torchquorum.formats.storage import Location, locate
from torchquorum.jobs.mnist_job import MODEL_NAMES, MnistOptions
from torchquorum.jobs.slow import parse_slow
from torchquorum.launcher.launched import LaunchOptions
from torchquorum.launcher.outcome import INTERRUPTED
from torchquorum.rules import parse_rule

SECONDS = 15.0


@click.command(cls=Command)
@click.argument("runs", nargs=-1)
@option("--rules", metavar="RULES", help="rules to compare; default: sync,async,bounded:3,sync:2of3")
@option("--slow", type=SLOW, metavar="W", help="slow workers down; default: worker1:3x; none for none")
@option("--seconds", type=float, metavar="S", help="budget of each rule in seconds; 15 unless --steps is given")
@option("--steps", type=int, metavar="N", help="budget of each rule in updates")
@option("--rounds", default=1, metavar="N", help="turns per rule that share its budget")
@option("--workers", default=3, metavar="N", help="number of workers")
@option("--ps", default=1, metavar="N", help="number of ps tasks")
@option("--model", type=Named(*MODEL_NAMES), default=DEFAULTS.model, help="softmax, mlp or cnn")
@option("--batch-size", default=DEFAULTS.batch_size, metavar="N", help="images per batch and worker")
@option("--optimizer", default=DEFAULTS.optimizer, metavar="NAME", help="a class of torch.optim")
@option("--lr", default=DEFAULTS.lr, metavar="X", help="learning rate")
@option("--compress", metavar="NAME", help="fewer bytes: int8, int4, topk:64/4096+2bit")
@option("--seed", default=DEFAULTS.seed, metavar="N", help="seed of weights and data order")
@option("--data", metavar="DIR", help="folder with MNIST's idx files; default: packaged")
@option("--transport", type=Named(*TRANSPORTS), default="auto", help="auto, shm or tcp")
@option("--link", metavar="RATE", help="each worker behind a line, e.g. 20mbit (root)")
@option("--output", "-o", metavar="DIR", help="output folder; default: runs/compare-DATE")
@option("--quiet", is_flag=True, help="print only the result")
def compare(runs: tuple[str, ...], **given: Any) -> int:
    """Train MNIST with several rules on the same budget, with one slowed worker; write a page and a PNG that compare them.

    With RUNS, the folders of existing runs, it compares these instead of training.

    \b
    Examples:
      torchquorum compare
      torchquorum compare --rules sync,async,bounded:3,sync:2of3 --slow worker1:3x
      torchquorum compare runs/a runs/b --output runs/a-and-b
    """
    console = Console(highlight=False)
    output = Path(given.pop("output") or next(n for n in run_folder_names("compare") if not Path(n).exists()))
    quiet = given.pop("quiet")
    if runs:
        names = [Path(r).name or r for r in runs]
        if len(runs) == 1:
            raise ConfigError(f"RUNS {''.join(runs)}: name at least two folders to compare, or none to train")
        unique = [n if names.count(n) == 1 else str(r) for n, r in zip(names, runs, strict=True)]
        _draw(console, list(zip(unique, map(locate, runs), strict=True)), output, "runs side by side", quiet=quiet)
        return 0
    return _train(console, _plan(output, **given), quiet=quiet)


@dataclass(frozen=True, kw_only=True)
class ComparePlan:
    """What to train: the rules, their common options, the cluster, and the number of turns per rule."""

    rules: list[str]
    base: MnistOptions
    cluster: LaunchOptions
    output: Path
    rounds: int = 1

    def folder(self, rule: str) -> Path:
        """Returns the folder of a rule's run."""
        return self.output / re.sub(r"[^a-z0-9]+", "-", rule.lower()).strip("-")

    def options(self, rule: str, turn: int) -> MnistOptions:
        """Returns the options of a rule's run in a turn, from 1; a later turn continues from the last checkpoint."""
        steps, seconds = self.base.steps, self.base.seconds
        steps = max(1, steps * turn // self.rounds) if steps is not None else None
        seconds = seconds / self.rounds if seconds is not None else None
        return replace(self.base, rule=rule, logdir=str(self.folder(rule)), steps=steps, seconds=seconds)

    @property
    def words(self) -> str:
        """Returns the plan in one line."""
        base, workers = self.base, self.cluster.range.most
        budget = [f"{base.steps:,} updates"] if base.steps else []
        budget += [f"{base.seconds:g} s"] if base.seconds else []
        turns = f" in {self.rounds} turns" if self.rounds > 1 else ""
        said = f"{base.model} on MNIST, {workers} {'worker' if workers == 1 else 'workers'}, {_slow_words(base.slow)}"
        return f"{said}, {' and at most '.join(budget)} each{turns}"


def _plan(output: Path, *, rules: str | None, slow: str | None, rounds: int, **given: Any) -> ComparePlan:
    workers, ps, transport, link = (given.pop(name) for name in ("workers", "ps", "transport", "link"))
    if given["seconds"] is None and given["steps"] is None:
        given["seconds"] = SECONDS
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: must be 1 or more")
    cluster = LaunchOptions(command=[], ps=ps, workers=workers, transport=transport, link=link)
    slow = slow if slow is not None else "worker1:3x" if workers > 1 else ""
    plan = ComparePlan(
        rules=_rules(rules, workers),
        base=MnistOptions(**given, slow=slow),
        cluster=cluster,
        output=output,
        rounds=rounds,
    )
    for rule in plan.rules:
        check_workers(plan.options(rule, 1), cluster.range)
        if plan.folder(rule).exists():
            raise ConfigError(
                f"{plan.folder(rule)}: already exists, and its run would be continued; give another --output"
            )
    return plan


def _train(console: Console, plan: ComparePlan, *, quiet: bool) -> int:
    """Trains every rule, turn by turn, and compares the runs that succeeded."""
    failed: dict[str, int] = {}
    for turn in range(1, plan.rounds + 1):
        for number, rule in enumerate(plan.rules, 1):
            if rule in failed:
                continue
            options = plan.options(rule, turn)
            if not quiet:
                of = f", turn {turn} of {plan.rounds}" if plan.rounds > 1 else ""
                console.print(f"{number} of {len(plan.rules)}{of}: {rule} ({plan.words})", soft_wrap=True)
            view = View(console, quiet=quiet, seconds=options.seconds)
            code = run_job(job_cluster(options, plan.cluster, view), view)
            if code == INTERRUPTED:
                return code
            if code != 0:
                failed[rule] = code
                console.print(f"torchquorum: {rule} failed (exit code {code}); the other rules continue")
    done = [(rule, plan.folder(rule)) for rule in plan.rules if rule not in failed]
    if done:
        _draw(console, done, plan.output, plan.words, quiet=quiet)
    return max(failed.values(), default=0)


def _rules(text: str | None, workers: int) -> list[str]:
    """Returns the rules to compare, each once."""
    if text is None:
        backup = [f"sync:{workers - 1}of{workers}"] if workers > 2 else []
        return ["sync", "async", "bounded:3", *backup]
    found = [part.strip().strip("'\"").lower().replace(" ", "") for part in text.strip().strip("'\"").split(",")]
    found = list(dict.fromkeys(filter(None, found)))
    if not found:
        raise ConfigError("--rules: name at least one rule, such as sync,async")
    for rule in found:
        parse_rule(rule, workers)
    return found


def _slow_words(slow: str) -> str:
    factors = parse_slow(slow)
    return ", ".join(f"worker {i} slowed {f:g} times" for i, f in sorted(factors.items())) or "none slowed"


def _draw(console: Console, found: Sequence[tuple[str, Location]], output: Path, below: str, *, quiet: bool) -> None:
    """Writes the page, the PNG and the JSON of existing runs."""
    from torchquorum.report.compare_page import as_json, compare_page, compare_picture
    from torchquorum.report.comparison import compare_runs, describe_comparison
    from torchquorum.report.history import read_history
    from torchquorum.report.html_page import write_page
    from torchquorum.report.png import write_png

    runs = compare_runs([(name, read_history(folder)) for name, folder in found])
    title = " and ".join([", ".join(r.name for r in runs[:-1]), runs[-1].name]) if len(runs) > 1 else runs[0].name
    if len(title) > 70:
        title = f"{len(runs)} runs side by side"
    write_page(compare_page(runs, title, below), output / "compare.html")
    write_png(compare_picture(runs, title, below), output / "compare.png")
    (output / "compare.json").write_text(json.dumps(as_json(runs), indent=2) + "\n")
    if not quiet:
        for line in describe_comparison(runs):
            console.print(f"- {line}", soft_wrap=True)
    console.print(f"page          {output / 'compare.html'}", soft_wrap=True)
    console.print(f"PNG           {output / 'compare.png'}", soft_wrap=True)
