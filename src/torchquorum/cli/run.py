"""`torchquorum run`: a local cluster of anybody's script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from torchquorum.cli.shape import Command, Named, Workers, durable_option, option
from torchquorum.cli.view import View
from torchquorum.cluster import TaskId
from torchquorum.cluster.flags import TRANSPORTS
from torchquorum.cluster.secret import read_access
from torchquorum.launcher.local import LocalCluster, Options, python_command
from torchquorum.launcher.watch import Watcher

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
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], quiet: bool, view: bool, **given: Any) -> int:
    """Start a local cluster of your own script: a process per task, which learns from `tq.join()` who it is.

    \b
    Examples:
      torchquorum run examples/mnist/train_quorum.py
      torchquorum run --ps 2 --workers 4 script.py --my-flag 3
      torchquorum run --view --workers 3 script.py
      torchquorum run --workers 2:8 script.py
    """
    console = Console(highlight=False)
    if given["report"]:
        given["report"] = str(Path(given["report"]).absolute())

    def output(task: TaskId, line: str) -> None:
        if not quiet:
            colour = "dim" if task.job == "ps" else COLOURS[task.index % len(COLOURS)]
            console.print(Text.assemble((f"[{task.job} {task.index}]", colour), " ", line), soft_wrap=True)

    cluster = LocalCluster(
        Options(command=python_command(script, arguments), **given),
        output,
        lambda line: console.print(f"torchquorum: {line}", soft_wrap=True),
    )
    if not view:
        cluster.start()
        return cluster.wait()
    with View(console) as live:
        watcher = Watcher(cluster.cluster.address(TaskId("ps", 0)), access=read_access(given["secret_file"]))
        try:
            cluster.start()
            return cluster.wait(lambda: live.show(watcher.status) if watcher.poll() else None)
        finally:
            watcher.close()
