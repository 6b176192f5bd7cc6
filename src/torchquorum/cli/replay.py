"""`torchquorum replay`: makes a recorded run again, bit for bit."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from torchquorum.cli.command import Command, option
from torchquorum.errors import ConfigError


@click.command(cls=Command)
@click.argument("run")
@option("--check", is_flag=True, help="compare with the run's checkpoints, bit for bit")
@option("--to", type=int, metavar="STEP", help="end at this global step and write its variables")
@option("--dump", type=int, metavar="STEP", help="write this update: variables before and after, every gradient")
@option("--quiet", is_flag=True, help="do not print the workers' output")
def replay(run: str, check: bool, to: int | None, dump: int | None, quiet: bool) -> int:
    """Make a recorded run again, bit for bit: its program runs again, and every update is made in the recorded order.

    \b
    Examples:
      torchquorum run --record --logdir runs/one script.py
      torchquorum replay runs/one --check
      torchquorum replay runs/one --dump 120     whose batch made the loss jump?
    """
    from torchquorum.replay.replay import ReplayOptions, make_again
    from torchquorum.replay.script import ScriptedLife

    folder = Path(run)
    if not folder.is_dir():
        raise ConfigError(f"{run}: no such folder; give a run's folder, such as runs/mnist")
    console = Console(highlight=False)

    def output(life: ScriptedLife, line: str) -> None:
        if not quiet:
            console.print(Text.assemble((f"[worker {life.worker}]", "cyan"), " ", line), soft_wrap=True)

    def say(line: str) -> None:
        console.print(f"torchquorum: {line}", soft_wrap=True)

    return make_again(ReplayOptions(folder=folder, check=check, to=to, dump=dump), say, output)
