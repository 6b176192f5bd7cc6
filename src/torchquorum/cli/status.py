"""`torchquorum status`: how a running cluster is doing, asked from outside."""

from __future__ import annotations

import json

import click
from rich.console import Console

from torchquorum.cli.view import worker_table
from torchquorum.cluster.spec import parse_address
from torchquorum.errors import DeadlineError
from torchquorum.launcher.watch import Watcher


@click.command(short_help="Show how a running cluster is doing.")
@click.argument("address")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--timeout", default=5.0, show_default=True, help="Seconds to wait for an answer.")
def status(address: str, as_json: bool, timeout: float) -> int:
    """Show how a running cluster is doing. ADDRESS is host:port of ps task 0.

    \b
    Example:
      torchquorum status localhost:2222
    """
    address = str(parse_address(address, label="ADDRESS"))
    watcher = Watcher(address)
    try:
        if not watcher.poll(timeout):
            raise DeadlineError(
                f"no answer from {address} within {timeout:g} s; is a ps task of torchquorum running there? "
                "Give the address of ps task 0, as in --ps_hosts"
            )
        body = watcher.status
    finally:
        watcher.close()
    if as_json:
        click.echo(json.dumps(body, indent=2))
        return 0
    console = Console(highlight=False)
    if not body.get("ready") or "per_worker" not in body:
        console.print(f"{body['task']}: waiting for the chief to create the variables")
        return 0
    total = f" of {body['last_step']}" if body["last_step"] else ""
    console.print(
        f"{body['rule']}: global step {body['global_step']}{total}, {len(body['live'])} of {body['workers']} workers live"
    )
    console.print(worker_table(body))
    return 0
