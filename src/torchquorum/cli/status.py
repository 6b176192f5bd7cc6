"""`torchquorum status`: shows the status of a running cluster."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from torchquorum.cli.command import Command, option
from torchquorum.cli.live_view import View
from torchquorum.cli.speeds import of_whole_run
from torchquorum.cli.status_table import (
    OTHER_LINES,
    OptimizerTable,
    RunBar,
    RunProgress,
    StatusTable,
    headline,
    refused_connections,
    rows_of,
)
from torchquorum.cluster.secret import read_access
from torchquorum.cluster.spec import parse_address
from torchquorum.errors import ConfigError
from torchquorum.launcher.watch import LEADER, Watcher


@click.command(cls=Command)
@click.argument("address", nargs=-1, required=True)
@option("--json", "as_json", is_flag=True, help="print everything as JSON; with --watch, one line each time")
@option("--watch", is_flag=True, help="repeat until the run is over, or Ctrl-C")
@option("--every", default=1.0, metavar="S", show_default=True, help="seconds between two updates, with --watch")
@option("--secret-file", metavar="FILE", help="file with the cluster's secret")
@option("--timeout", default=5.0, metavar="S", show_default=True, help="seconds to wait for an answer")
def status(
    address: tuple[str, ...], as_json: bool, watch: bool, every: float, timeout: float, secret_file: str | None
) -> int:
    """Show the status of a running cluster. ADDRESS is host:port of ps task 0.

    \b
    Examples:
      torchquorum status localhost:2222
      torchquorum status localhost:2222 --watch
      torchquorum status localhost:2222 --json
      torchquorum status alpha:2222 --secret-file cluster.secret
    """
    for name, value in (("--every", every), ("--timeout", timeout)):
        if not value > 0:
            raise ConfigError(f"{name} {value:g}: must be more than 0 seconds")
    first = "".join(address).split(",")[0]  # a list, as in --ps_hosts, begins with ps task 0
    where = str(parse_address(first, label="ADDRESS"))
    watcher = Watcher(where, every_s=every if watch else 0.5, access=read_access(secret_file))
    try:
        body = watcher.ask(timeout)
        leader = body.get("leader")
        if "per_worker" not in body and body.get("task") != LEADER and leader:
            click.echo(f"{body['task']} holds a shard only; asking {LEADER} ({leader})", err=as_json)
            watcher.close()
            watcher = Watcher(leader, every_s=every if watch else 0.5, access=read_access(secret_file))
            body = watcher.ask(timeout)
        if watch:
            return _watch(watcher, timeout, as_json=as_json)
    finally:
        watcher.close()
    if as_json:
        click.echo(json.dumps(body, indent=2))
    else:
        _show(Console(highlight=False), body)
    return 0


def _is_ready(body: dict[str, Any]) -> bool:
    return bool(body.get("ready")) and "per_worker" in body


def _show(console: Console, body: dict[str, Any]) -> None:
    if not _is_ready(body):
        console.print(f"{body['task']}: waiting for the chief to create the variables")
        if away := refused_connections(body):
            console.print(Text(away, "dim"))
        return
    step, last, speeds = body["global_step"], body["last_step"], of_whole_run(body)
    left = (last - step) / speeds.updates_per_s if last and speeds.updates_per_s and not body["stopped"] else None
    console.print(RunBar(RunProgress("global step", step, last, left)))
    console.print(Text(str(speeds), "dim"))
    console.print(Text(headline(body), "dim"))
    optimizers = OptimizerTable(body)
    console.print(optimizers)
    console.print(StatusTable(rows_of(body), other_lines=OTHER_LINES + optimizers.lines))
    if console.is_terminal and not body["stopped"]:
        console.print(Text("--watch repeats this until the run is over, with the speeds of the last seconds", "dim"))


def _watch(watcher: Watcher, timeout: float, *, as_json: bool) -> int:
    console = Console(highlight=False)
    view = View(console, plain_every_s=0.0)
    with view if not as_json else View(console, quiet=True):
        while True:
            if as_json:
                click.echo(json.dumps(watcher.status))
            else:
                view.show(watcher.status)
            while not watcher.poll(0.2):
                if watcher.silent_s > max(timeout, 3 * watcher.every_s):
                    over = bool(watcher.status.get("stopped"))
                    view.note("the run is over" if over else f"no answer for {timeout:g} s: ps task 0 is gone")
                    return 0 if over else 1
