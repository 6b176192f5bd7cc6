"""`torchquorum scale`: changes the number of workers of a running job."""

from __future__ import annotations

import click

from torchquorum.cli.command import Command, option
from torchquorum.cluster.secret import read_access
from torchquorum.cluster.spec import parse_address
from torchquorum.errors import ConfigError
from torchquorum.launcher.scaling import ask_to_scale


@click.command(cls=Command)
@click.argument("address")
@click.argument("workers", type=int)
@option("--secret-file", metavar="FILE", help="file with the cluster's secret")
@option("--timeout", default=5.0, metavar="S", show_default=True, help="seconds to wait for an answer")
def scale(address: str, workers: int, secret_file: str | None, timeout: float) -> int:
    """Change the number of WORKERS of a running job, within its MIN:MAX. ADDRESS is host:port of ps task 0.

    The launcher starts missing workers; surplus workers finish their batch and leave.

    \b
    Examples:
      torchquorum run --workers 2:8 script.py
      torchquorum scale 127.0.0.1:40123 5
    """
    if not timeout > 0:
        raise ConfigError(f"--timeout {timeout:g}: must be more than 0 seconds")
    where = str(parse_address(address.split(",")[0], label="ADDRESS"))
    found = ask_to_scale(where, workers, read_access(secret_file), timeout)
    live = len(found.live)
    there = f"{live} {'worker is' if live == 1 else 'workers are'} alive"
    click.echo(f"{there}, {found.workers} wanted: {_what(found.workers, found.live, found.leaving)}")
    return 0


def _what(wanted: int, live: list[int], leaving: list[int]) -> str:
    if leaving:
        return f"{', '.join(f'/job:worker/task:{i}' for i in leaving)} will leave after their current batch"
    missing = wanted - len(live)
    if missing <= 0:
        return "no change"
    return f"the launcher starts {missing} more; if you start tasks by hand, start them with a free index"
