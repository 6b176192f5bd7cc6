"""`torchquorum run`: runs a script on a cluster, on this machine or on Ray."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from torchquorum.cli.command import Command, Named, Workers, durable_option, option
from torchquorum.cli.dashboard import dashboard_beside
from torchquorum.cli.live_view import View
from torchquorum.cli.run_end import RunReport, report_of_run, show_end, typed_command
from torchquorum.cluster import TaskId
from torchquorum.cluster.flags import TRANSPORTS
from torchquorum.errors import ConfigError
from torchquorum.launcher.launched import LaunchedCluster, LaunchOptions, Note, TaskOutput
from torchquorum.launcher.local import LocalCluster, python_command
from torchquorum.launcher.outcome import INTERRUPTED
from torchquorum.launcher.watch import RunWatcher

RAY = "Where to run"
PLACE = {  # the options for Ray, and their names in `Ray`
    "address": "address",
    "cpus_per_worker": "cpus_per_worker",
    "gpus_per_worker": "gpus_per_worker",
    "placement_timeout": "placement_timeout_s",
}
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@option("--ps", default=1, metavar="N", help="number of ps tasks")
@option("--workers", type=Workers(), default=2, help="number of workers, or a range MIN:MAX")
@option("--transport", type=Named(*TRANSPORTS), default="auto", help="auto, shm or tcp")
@option("--threads", type=int, metavar="N", help="threads per operation; default: cores / workers")
@option("--logdir", metavar="DIR", help="run folder, for scripts that set none")
@durable_option("--durable")
@option("--start-afresh", is_flag=True, help="begin at step 0 if nothing can be restored")
@option("--accept-loss", is_flag=True, help="durable: go on although updates are lost")
@option("--record", is_flag=True, help="record the run, for `torchquorum replay`")
@option("--report", metavar="FILE", help="write the final report to this file, as JSON")
@option("--secret-file", metavar="FILE", help="encrypt connections with the secret in this file")
@option("--link", metavar="RATE", help="each worker behind a line, e.g. 20mbit (root)")
@option("--max-restarts", default=3, metavar="N", help="restarts of each task that a signal ended")
@option("--events/--no-events", default=True, help="write TensorBoard events, where a script does not")
@option("--view", is_flag=True, help="show a live table of the workers below the output")
@option("--dashboard", is_flag=True, help="serve a live page of the run for a browser")
@option("--quiet", is_flag=True, help="do not print the tasks' output")
@option(
    "--on",
    type=Named("local", "ray"),
    default="local",
    section=RAY,
    help="local, or ray: machines of a Ray cluster",
)
@option("--address", metavar="A", section=RAY, help="Ray cluster: auto, host:port; default: start Ray")
@option("--cpus-per-worker", type=float, metavar="N", section=RAY, help="CPUs that each worker reserves; default: 1")
@option("--gpus-per-worker", type=float, metavar="N", section=RAY, help="GPUs that each worker reserves; default: 0")
@option(
    "--placement-timeout",
    type=float,
    metavar="S",
    section=RAY,
    help="seconds to wait for the first machines; default: 300",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str, arguments: tuple[str, ...], quiet: bool, view: bool, dashboard: bool, on: str, **given: Any
) -> int:
    """Run your own script on a cluster, one process per task; `tq.join()` tells each which task it is.

    \b
    Examples:
      torchquorum run examples/mnist/train_quorum.py
      torchquorum run --ps 2 --workers 4 script.py --my-flag 3
      torchquorum run --view --workers 3 script.py
      torchquorum run --workers 2:8 script.py
      torchquorum run --on ray --address auto --ps 2 --workers 8 script.py
    """
    console = Console(highlight=False)
    if on == "ray":
        given["report"] = str(Path(given["report"]).absolute()) if given["report"] else None
        return _run(console, on, given, script, arguments, RunDisplay(quiet, view, dashboard))
    with report_of_run(given["report"]) as report:
        given["report"] = str(report.path)
        return _run(console, on, given, script, arguments, RunDisplay(quiet, view, dashboard, report))


@dataclass(frozen=True)
class RunDisplay:
    """What of a run is shown: the tasks' lines, a live table, a page, and what ps task 0 reports at the end."""

    quiet: bool
    view: bool
    dashboard: bool
    report: RunReport | None = None


def _run(
    console: Console, on: str, given: dict[str, Any], script: str, arguments: tuple[str, ...], shown: RunDisplay
) -> int:
    def output(task: TaskId, line: str) -> None:
        if not shown.quiet:
            colour = "dim" if task.job == "ps" else COLOURS[task.index % len(COLOURS)]
            console.print(Text.assemble((f"[{task.job} {task.index}]", colour), " ", line), soft_wrap=True)

    place = {name: given.pop(key) for key, name in PLACE.items()}
    options = LaunchOptions(command=python_command(script, arguments), typed=typed_command(), **given)
    cluster = _cluster(on, place, options, output, lambda line: console.print(f"torchquorum: {line}", soft_wrap=True))
    try:
        code = _watch(console, cluster, shown)
    except KeyboardInterrupt:  # before all tasks were started
        cluster.stop(signal.SIGTERM)
        code = INTERRUPTED
    finally:
        cluster.close()
    show_end(console, code, shown.report.read() if shown.report is not None else None, cluster)
    return code


def _watch(console: Console, cluster: LaunchedCluster, shown: RunDisplay) -> int:
    if not shown.view:
        cluster.start()
        with dashboard_beside(shown.dashboard, cluster, console.print):
            return cluster.wait()
    with View(console) as live:
        watcher = RunWatcher(cluster.leader, access=lambda: cluster.access)
        try:
            cluster.start()
            with dashboard_beside(shown.dashboard, cluster, live.note):
                return cluster.wait(lambda: live.show(watcher.status) if watcher.poll() else live.wait())
        finally:
            watcher.close()


def _cluster(on: str, place: dict[str, Any], options: LaunchOptions, output: TaskOutput, note: Note) -> LaunchedCluster:
    chosen = {name: value for name, value in place.items() if value is not None}
    if on == "ray":
        from torchquorum.launcher.on_ray import RayCluster
        from torchquorum.launcher.ray_cluster import Ray

        if options.link is not None:
            raise ConfigError(f"--link {options.link}: makes lines between tasks of this machine; leave out --on ray")
        return RayCluster(options, Ray(**chosen), output, note)
    for key, name in PLACE.items():
        if name in chosen:
            value = f"{chosen[name]:g}" if isinstance(chosen[name], float) else chosen[name]
            raise ConfigError(f"--{key.replace('_', '-')} {value}: applies only to Ray; add --on ray")
    return LocalCluster(options, output, note)
