"""`torchquorum secret`: creates the secret of a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from torchquorum import env
from torchquorum.cli.command import Command, option
from torchquorum.cluster.secret import make_secret, read_access, write_secret
from torchquorum.errors import ConfigError


@click.command(cls=Command)
@option("--out", metavar="FILE", help="write it to this new file, readable only by you; default: print it")
@option(
    "--read-only", is_flag=True, help="make the read-only form of a secret: for tq.Reader and status, and nothing else"
)
@option("--secret-file", metavar="FILE", help="the cluster's secret, for --read-only")
def secret(out: str | None, read_only: bool, secret_file: str | None) -> int:
    """Create the secret that protects a cluster: only tasks that have it may join.

    Copy the file to every host. Tasks on more than one host need it; their connections are then encrypted.

    \b
    Examples:
      torchquorum secret --out cluster.secret
      torchquorum train --job_name=ps ... --secret-file cluster.secret
      export TORCHQUORUM_SECRET_FILE=cluster.secret
      torchquorum secret --read-only --secret-file cluster.secret --out reading.secret
    """
    if secret_file is not None and not read_only:
        raise ConfigError("--secret-file is for --read-only: a new secret is made of nothing; leave it out")
    text = _read_only(secret_file) if read_only else make_secret()
    if out is None:
        click.echo(text)
        return 0
    path = Path(out).expanduser()
    write_secret(path, text)
    if read_only:
        click.echo(
            f"wrote a read-only secret to {path}; give it to those who read the run: tq.Reader(..., secret_file='{path}')"
        )
        return 0
    click.echo(f"wrote a new secret to {path}; copy it to every host and start every task with --secret-file={path}")
    return 0


def _read_only(secret_file: str | None) -> str:
    """Returns the read-only form of the cluster's secret."""
    from torchquorum.wire.tls_keys import read_only_form  # here, since it loads cryptography

    found = read_access(secret_file).secret
    if found is None:
        raise ConfigError(
            f"--read-only is made from the cluster's secret: give --secret-file=FILE, or set {env.SECRET_FILE}"
        )
    return read_only_form(found)
