"""`torchquorum report`: an HTML page with the charts of a run."""

from __future__ import annotations

from pathlib import Path

import click

from torchquorum.cli.command import Command, option

NAME = "report.html"


@click.command(cls=Command)
@click.argument("run")
@option("--output", "-o", metavar="FILE", help="file to write; default: RUN/report.html")
def report(run: str, output: str | None) -> int:
    """Write a self-contained HTML page about RUN, a run's folder; the run may still be running.

    \b
    Examples:
      torchquorum report runs/mnist
      torchquorum report runs/mnist --output mnist.html
    """
    from torchquorum.formats.storage import locate
    from torchquorum.report.history import read_history
    from torchquorum.report.html_page import write_page
    from torchquorum.report.run_page import run_page

    history = read_history(locate(run))
    target = locate(output) if output else locate(run) / NAME
    if isinstance(target, Path) and target.is_dir():
        target /= NAME
    write_page(run_page(history), target)
    click.echo(f"wrote {target}")
    for line in history.missing:
        click.echo(f"  {line}")
    return 0
