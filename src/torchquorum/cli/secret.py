"""`torchquorum secret`: makes the secret of a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from torchquorum.cli.shape import Command, option
from torchquorum.cluster.secret import make_secret, write_secret


@click.command(cls=Command)
@option("--out", metavar="FILE", help="write it into this new file, which only you can read, instead of printing it")
def secret(out: str | None) -> int:
    """Make the secret that keeps strangers out of a cluster: whoever knows it may join, nobody else.

    Copy the file to every host. Tasks on more than one host need it; they then talk encrypted.

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
    click.echo(f"a new secret is in {path}; copy it to every host and give every task --secret-file={path}")
    return 0
