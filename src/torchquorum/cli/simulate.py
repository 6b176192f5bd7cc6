"""`torchquorum simulate`: what rules would do with these workers, in virtual time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from torchquorum.cli.command import Checked, Command, Workers, option
from torchquorum.cli.run_folder import run_folder_names
from torchquorum.cluster.worker_range import WorkerRange
from torchquorum.errors import ConfigError
from torchquorum.formats.storage import locate
from torchquorum.jobs.slow import parse_slow
from torchquorum.report.scales import number
from torchquorum.rules import parse_rule
from torchquorum.simulation.network import Network, parse_bandwidth, parse_size
from torchquorum.simulation.recorded_run import RecordedRun, read_run
from torchquorum.simulation.scenario import Scenario, SlowDown
from torchquorum.simulation.step_times import parse_seconds, parse_times
from torchquorum.simulation.sweep import read_sweep, sweep

TIMES, WORKERS = "lognormal:0.1:0.5", 8
DURATION, SIZE, BANDWIDTH = Checked(parse_seconds), Checked(parse_size), Checked(parse_bandwidth)
_FROM_SECOND = re.compile(r"([0-9.]+(?:ms|s|m|h)):(.+)")


@click.command(cls=Command)
@option(
    "--rule", type=Checked(parse_rule), metavar="RULE", help="sync, sync:7, sync:auto, async, bounded:3, ... [sync]"
)
@option(
    "--sweep",
    "rules",
    metavar="RULES",
    help="several rules, with commas; backup: sync with every number of backup workers",
)
@option(
    "--workers",
    type=Workers(),
    metavar="N|MIN:MAX",
    help=f"number of workers; MIN at first, with --arrive-every [{WORKERS}]",
)
@option(
    "--times", type=Checked(parse_times), metavar="T", help=f"seconds per step: 0.1, exponential:0.1, ... [{TIMES}]"
)
@option("--from", "run", metavar="RUN", help="take rule, workers and times from a run's folder")
@option("--slow", multiple=True, metavar="W", help="worker1:3x, or from a time on: 60s:worker1:3x; may be repeated")
@option("--updates", type=int, metavar="N", help="updates to make [1000]")
@option("--gradients", type=int, metavar="N", help="end after this many gradients")
@option("--seconds", type=DURATION, metavar="S", help="end after this much virtual time")
@option("--batch-size", default=1, metavar="N", help="examples per gradient")
@option("--noise", type=float, metavar="B", help="gradient noise scale, in gradients; an update of k is worth k/(k+B)")
@option("--seed", default=0, metavar="N", help="seed of everything random")
@option("--bytes", "size", type=SIZE, metavar="SIZE", section="Network", help="bytes of the variables, such as 100MB")
@option("--bandwidth", type=BANDWIDTH, metavar="RATE", section="Network", help="of each ps, such as 10Gbit")
@option(
    "--worker-bandwidth", type=BANDWIDTH, metavar="RATE", section="Network", help="of each worker; default: the same"
)
@option("--latency", type=DURATION, metavar="S", section="Network", help="of each transfer, such as 1ms")
@option("--ps", default=1, metavar="N", section="Network", help="number of ps tasks")
@option("--fail-every", type=DURATION, metavar="S", section="Failures", help="mean time to the failure of a worker")
@option("--restart-after", type=DURATION, metavar="S", section="Failures", help="time until it is back; default: never")
@option("--notice-after", type=DURATION, metavar="S", section="Failures", help="time until a failure is noticed [5s]")
@option("--arrive-every", type=DURATION, metavar="S", section="Failures", help="mean time between new workers")
@option("--output", "-o", metavar="DIR", section="Output", help="output folder; default: runs/simulate-DATE")
@option("--quiet", is_flag=True, section="Output", help="print only the files")
def simulate(run: str | None, rules: str | None, **given: Any) -> int:
    """Simulate rules: the quorum of a real run, in virtual time; write a page and a PNG with what they would do.

    \b
    Examples:
      torchquorum simulate --workers 10000 --rule sync:9500 --times exponential:0.1
      torchquorum simulate --workers 16 --sweep backup --times pareto:0.1:2.5
      torchquorum simulate --from runs/mnist --sweep sync,bounded:3,sync:auto
    """
    output = Path(given.pop("output") or next(n for n in run_folder_names("simulate") if not Path(n).exists()))
    quiet, rule = given.pop("quiet"), given.pop("rule")
    if rule is not None and rules is not None:
        raise ConfigError(f"--rule {rule} and --sweep {rules}: give one of them; --sweep takes several rules")
    recorded = read_run(locate(run)) if run is not None else None
    scenario = _scenario(recorded, rule=rule, **given)
    names = read_sweep(rules, scenario.workers) if rules is not None else [rule or _written(recorded)]
    _draw(scenario, names, recorded, output, _words(scenario, given["times"], run), quiet=quiet)
    return 0


def _written(recorded: RecordedRun | None) -> str:
    return recorded.rule.text if recorded is not None else "sync"


def _scenario(recorded: RecordedRun | None, *, workers: WorkerRange | None, rule: str | None, **given: Any) -> Scenario:
    if recorded is not None and given["times"] is not None:
        raise ConfigError(f"--times {given['times']} and --from: the run has its own times; give one of them")
    counts = workers or WorkerRange.read(recorded.workers if recorded is not None else WORKERS)
    arrive = given["arrive_every"]
    if counts.elastic and arrive is None:
        raise ConfigError(f"--workers {counts.least}:{counts.most}: give --arrive-every too, or the others never come")
    needs_bytes = [n for n in ("bandwidth", "worker_bandwidth") if given[n] is not None and given["size"] is None]
    if needs_bytes or (given["size"] is not None and given["bandwidth"] is None):
        raise ConfigError(
            "--bytes and --bandwidth belong together: give both, such as --bytes 100MB --bandwidth 10Gbit"
        )
    if given["ps"] != 1 and given["size"] is None:
        raise ConfigError(f"--ps {given['ps']}: the number of ps tasks has an effect with --bytes only; give it too")
    end = {"updates": given["updates"], "gradients": given["gradients"], "seconds": _seconds(given["seconds"])}
    if recorded is not None and not any(end.values()):
        end["updates"] = max(1, recorded.updates)
    return Scenario(
        rule=rule or _written(recorded),
        workers=counts.most,
        times=recorded.times if recorded is not None else given["times"] or TIMES,
        start=counts.least if counts.elastic else None,
        arrive_s=_seconds(arrive),
        fail_s=_seconds(given["fail_every"]),
        restart_s=_seconds(given["restart_after"]),
        notice_s=_seconds(given["notice_after"]) or 5.0,
        slow=[_slow(text, counts.most) for text in given["slow"]],
        network=_network(**given),
        batch_size=given["batch_size"],
        noise=given["noise"],
        seed=given["seed"],
        **end,
    )


def _network(*, size: str | None, bandwidth: str | None, latency: str | None, ps: int, **given: Any) -> Network:
    own = given["worker_bandwidth"]
    latency_s = parse_seconds(latency) if latency else 0.0
    if size is None or bandwidth is None:
        return Network(latency_s=latency_s)
    return Network(
        size_bytes=parse_size(size),
        bandwidth=parse_bandwidth(bandwidth),
        worker_bandwidth=parse_bandwidth(own) if own else None,
        latency_s=latency_s,
        ps=ps,
    )


def _slow(text: str, workers: int) -> SlowDown:
    """Reads worker1:3x, or 60s:worker1:3x for a change during the run."""
    match = _FROM_SECOND.fullmatch(text.strip().strip("'\""))
    return SlowDown(parse_seconds(match[1]) if match else 0.0, parse_slow(match[2] if match else text, workers))


def _seconds(text: str | None) -> float | None:
    return parse_seconds(text) if text is not None else None


def _words(scenario: Scenario, times: str | None, run: str | None) -> str:
    """Returns the scenario in one line."""
    s, net = scenario, scenario.network
    words = [f"{s.workers:,} workers" if s.start is None else f"{s.start:,} to {s.workers:,} workers"]
    words.append(f"step times of {run}" if run is not None else f"step times {times or TIMES}")
    for change in s.slow_downs:
        since = f" from {change.at_s:g} s on" if change.at_s else ""
        words.append(", ".join(f"worker {i} {f:g} times as long" for i, f in sorted(change.factors.items())) + since)
    if net.size_bytes:
        words.append(f"{number(net.size_bytes / 1e6)} MB over {number(net.bandwidth / 125e6)} Gbit/s, {net.ps} ps")
    words += [f"a failure every {s.fail_s:g} s per worker"] if s.fail_s is not None else []
    words += [f"an arrival every {s.arrive_s:g} s"] if s.arrive_s is not None else []
    words += [f"noise scale {s.noise:g}"] if s.noise is not None else []
    ends = {"updates": s.updates, "gradients": s.gradients, "s": s.seconds}
    words.append(" or ".join(f"{value:,g} {name}" for name, value in ends.items() if value is not None))
    return ", ".join([*words, f"seed {s.seed}"])


def _draw(
    scenario: Scenario, names: list[str], recorded: RecordedRun | None, output: Path, below: str, *, quiet: bool
) -> None:
    from torchquorum.report.html_page import write_page
    from torchquorum.report.png import write_png
    from torchquorum.report.simulation_page import (
        SimulatedSweep,
        as_json,
        describe_sweep,
        simulation_page,
        simulation_picture,
    )

    found = SimulatedSweep(runs=sweep(scenario, names), below=below, recorded=recorded)
    write_page(simulation_page(found), output / "simulate.html")
    write_png(simulation_picture(found), output / "simulate.png")
    (output / "simulate.json").write_text(json.dumps(as_json(found), indent=2) + "\n")
    if not quiet:
        click.echo(below)
        for line in describe_sweep(found):
            click.echo(f"- {line}")
        if len(names) > 4:
            for r in found.runs:
                f = r.figures
                click.echo(f"  {r.name:12} {number(f.updates_per_s):>8} updates/s {number(f.examples_per_s):>8} used/s")
    click.echo(f"page          {output / 'simulate.html'}")
    click.echo(f"PNG           {output / 'simulate.png'}")
