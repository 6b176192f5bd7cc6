"""`torchquorum secret`: creates the secret of a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from torchquorum.cli.command import Command, option
from torchquorum.cluster.secret import make_secret, write_secret


@click.command(cls=Command)
@option("--out", metavar="FILE", help="write it to this new file, readable only by you; default: print it")
def secret(out: str | None) -> int:
    """Create the secret that protects a cluster: only tasks that have it may join.

    Copy the file to every host. Tasks on more than one host need it; their connections are then encrypted.

    \b
    Examples:
      torchquorum secret --out cluster.secret
      torchquorum train --job_name=ps ... --secret-file cluster.secret
      export TORCHQUORUM_SECRET_FILE=cluster.secret
    """
    if out is None:
        click.echo(make_secret())
        return 0
    path = Path(out).expanduser()
    write_secret(path)
    click.echo(f"wrote a new secret to {path}; copy it to every host and start every task with --secret-file={path}")
    return 0
