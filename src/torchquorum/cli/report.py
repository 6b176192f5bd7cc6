"""`torchquorum report`: one page with the pictures of a run."""

from __future__ import annotations

from pathlib import Path

import click

from torchquorum.cli.shape import Command, option

NAME = "report.html"


@click.command(cls=Command)
@click.argument("run")
@option("--output", "-o", metavar="FILE", help="where to write it; RUN/report.html if not given")
def report(run: str, output: str | None) -> int:
    """Write one self-contained HTML page about RUN, a run's folder; of a run that goes on, as it stands.

    \b
    Examples:
      torchquorum report runs/mnist
      torchquorum report runs/mnist --output mnist.html
    """
    from torchquorum.formats.storage import locate
    from torchquorum.pictures.history import read_history
    from torchquorum.pictures.page import write_page
    from torchquorum.pictures.run_page import run_page

    history = read_history(locate(run))
    target = locate(output) if output else locate(run) / NAME
    if isinstance(target, Path) and target.is_dir():
        target /= NAME
    write_page(run_page(history), target)
    click.echo(f"wrote {target}")
    for line in history.missing:
        click.echo(f"  {line}")
    return 0
