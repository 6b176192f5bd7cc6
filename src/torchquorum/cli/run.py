"""`torchquorum run`: a cluster of anybody's script, on this machine or on Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from torchquorum.cli.shape import Command, Named, Workers, durable_option, option
from torchquorum.cli.view import View
from torchquorum.cluster import TaskId
from torchquorum.cluster.flags import TRANSPORTS
from torchquorum.errors import ConfigError
from torchquorum.launcher.local import LaunchedCluster, LocalCluster, Options, python_command
from torchquorum.launcher.watch import RunWatcher

RAY = "Where"
PLACE = {  # the options about Ray, by what they are called there
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
@option("--ps", default=1, metavar="N", help="ps tasks")
@option("--workers", type=Workers(), default=2, help="workers; MIN:MAX lets them come and go")
@option("--transport", type=Named(*TRANSPORTS), default="auto", help="auto, shm or tcp")
@option("--threads", type=int, metavar="N", help="of an operation, per task; the cores are shared out if not given")
@option("--logdir", metavar="DIR", help="the run's folder, for scripts that name none")
@durable_option("--durable")
@option("--report", metavar="FILE", help="write the report as JSON to this file")
@option("--secret-file", metavar="FILE", help="the tasks talk encrypted, with the secret in this file")
@option("--max-restarts", default=3, metavar="N", help="times a task that a signal ended is started again")
@option("--view", is_flag=True, help="show the live table of the workers below the output")
@option("--quiet", is_flag=True, help="do not print the tasks' output")
@option("--on", type=Named("local", "ray"), default="local", section=RAY, help="local, or ray: on Ray's machines")
@option("--address", metavar="A", section=RAY, help="the Ray cluster: auto, host:port; without, Ray is started here")
@option("--cpus-per-worker", type=float, metavar="N", section=RAY, help="that each worker reserves; 1 if not given")
@option("--gpus-per-worker", type=float, metavar="N", section=RAY, help="likewise, on its machine; none if not given")
@option("--placement-timeout", type=float, metavar="S", section=RAY, help="to wait for the first machines; 300 s")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], quiet: bool, view: bool, on: str, **given: Any) -> int:
    """Start a cluster of your own script: a process per task, which learns from `tq.join()` who it is.

    \b
    Examples:
      torchquorum run examples/mnist/train_quorum.py
      torchquorum run --ps 2 --workers 4 script.py --my-flag 3
      torchquorum run --view --workers 3 script.py
      torchquorum run --workers 2:8 script.py
      torchquorum run --on ray --address auto --ps 2 --workers 8 script.py
    """
    console = Console(highlight=False)
    if given["report"]:
        given["report"] = str(Path(given["report"]).absolute())

    def output(task: TaskId, line: str) -> None:
        if not quiet:
            colour = "dim" if task.job == "ps" else COLOURS[task.index % len(COLOURS)]
            console.print(Text.assemble((f"[{task.job} {task.index}]", colour), " ", line), soft_wrap=True)

    place = {name: given.pop(key) for key, name in PLACE.items()}
    options = Options(command=python_command(script, arguments), **given)
    cluster = _cluster(on, place, options, output, lambda line: console.print(f"torchquorum: {line}", soft_wrap=True))
    try:
        if not view:
            cluster.start()
            return cluster.wait()
        with View(console) as live:
            watcher = RunWatcher(cluster.leader, access=lambda: cluster.access)
            try:
                cluster.start()
                return cluster.wait(lambda: live.show(watcher.status) if watcher.poll() else None)
            finally:
                watcher.close()
    finally:
        cluster.close()


def _cluster(
    on: str,
    place: dict[str, Any],
    options: Options,
    output: Callable[[TaskId, str], None],
    note: Callable[[str], None],
) -> LaunchedCluster:
    chosen = {name: value for name, value in place.items() if value is not None}
    if on == "ray":
        from torchquorum.launcher.on_ray import RayCluster
        from torchquorum.launcher.ray_cluster import Ray

        return RayCluster(options, Ray(**chosen), output, note)
    for key, name in PLACE.items():
        if name in chosen:
            value = f"{chosen[name]:g}" if isinstance(chosen[name], float) else chosen[name]
            raise ConfigError(f"--{key.replace('_', '-')} {value}: is about Ray's machines; say --on ray, too")
    return LocalCluster(options, output, note)
