"""`torchquorum run`: a local cluster of anybody's script."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.text import Text

from torchquorum.cluster import TaskId
from torchquorum.launcher.local import LocalCluster, Options, python_command

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


@click.command(
    short_help="Start a local cluster of your own script.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option("--ps", default=1, show_default=True, help="Number of ps tasks.")
@click.option("--workers", default=2, show_default=True, help="Number of workers.")
@click.option("--transport", default="auto", show_default=True, help="auto, shm or tcp.")
@click.option("--threads", type=int, help="Threads of an operation per task; the cores are shared out by default.")
@click.option("--logdir", help="The run's folder, for scripts that name none.")
@click.option("--report", help="Write the report as JSON to this file.")
@click.option(
    "--max-restarts", default=3, show_default=True, help="How often a task that a signal ended is started again."
)
@click.option("--quiet", is_flag=True, help="Do not print the tasks' output.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], quiet: bool, **given: Any) -> int:
    """Start a local cluster of your own script: one process per task, which learns from `tq.join()` who it is.

    \b
    Examples:
      torchquorum run examples/mnist/train_quorum.py
      torchquorum run --ps 2 --workers 4 script.py --my-flag 3
    """
    from pathlib import Path

    from torchquorum.cluster.flags import check_transport

    check_transport(given["transport"], label="--transport")
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
    cluster.start()
    code = cluster.wait()
    return code
