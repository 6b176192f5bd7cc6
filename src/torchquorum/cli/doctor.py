"""`torchquorum doctor`: checks this machine and the connections to a cluster, with advice for each problem."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text

from torchquorum import env
from torchquorum.cli.command import ClusterCommand, option
from torchquorum.cli.doctor_checks import CheckResult, check_hosts, check_machine, check_secret
from torchquorum.cluster import ClusterSpec, resolve
from torchquorum.cluster.secret import read_access
from torchquorum.cluster.spec import parse_address, split_addresses
from torchquorum.errors import ConfigError
from torchquorum.formats.storage import locate
from torchquorum.lines import counted

_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


@click.command(cls=ClusterCommand)
@option(
    "--ps-hosts",
    "--ps-host",
    "ps_hosts",
    metavar="HOSTS",
    help="host:port,... of the ps tasks to connect to",
)
@option("--worker-hosts", "--worker-host", "worker_hosts", metavar="HOSTS", help="host:port,... of the workers")
@option("--secret-file", metavar="FILE", help="file with the cluster's secret")
@option("--insecure", is_flag=True, hidden=True)
@option("--logdir", default="runs", metavar="DIR", help="folder for runs")
@option("--timeout", default=3.0, metavar="S", help="seconds to wait for each host")
@option("--json", "as_json", is_flag=True, help="print the results as JSON")
def doctor(
    ps_hosts: str | None,
    worker_hosts: str | None,
    secret_file: str | None,
    insecure: bool,
    logdir: str,
    timeout: float,
    as_json: bool,
) -> int:
    """Check this machine, and the connections to a cluster's hosts (those of TF_CONFIG, if none are given).

    The exit code is 0 if training can start, 1 if something prevents it.

    \b
    Examples:
      torchquorum doctor
      torchquorum doctor --ps_hosts=a:2222 --worker_hosts=b:2222,c:2222
    """
    if not timeout > 0:
        raise ConfigError(f"--timeout {timeout:g}: must be more than 0 seconds")
    hosts = _hosts(ps_hosts, worker_hosts)
    access = read_access(secret_file, insecure or None)
    results = [*check_machine(locate(logdir)), *check_secret(access, hosts), *check_hosts(hosts, timeout, access)]
    if as_json:
        click.echo(json.dumps([asdict(f) for f in results], indent=2))
    else:
        _print(results)
    return 1 if any(f.level == "fail" for f in results) else 0


def _hosts(ps_hosts: str | None, worker_hosts: str | None) -> dict[str, list[str]]:
    """Returns the addresses to check, by job: those given, or those of TF_CONFIG."""
    given = {"ps": ps_hosts, "worker": worker_hosts}
    hosts = {
        job: [parse_address(a, label=f"{job} {i}") for i, a in enumerate(split_addresses(text))]
        for job, text in given.items()
        if text is not None
    }
    if len(hosts) == 2:
        return ClusterSpec(hosts).as_dict()  # raises if two tasks share an address
    if not hosts and env.tf_config() is not None:
        found = resolve([])
        return found.cluster.as_dict() if found is not None else {}
    return hosts


def _print(results: list[CheckResult]) -> None:
    console = Console(highlight=False)
    width = max(len(f.name) for f in results)
    for f in results:
        mark, style = _MARKS[f.level]
        console.print(Text.assemble((mark, style), "  ", (f.name.ljust(width), "bold"), "  ", f.found), soft_wrap=True)
        if f.advice:
            console.print(Text.assemble(" " * (width + 8), ("-> " + f.advice, style)), soft_wrap=True)
    bad, odd = (sum(f.level == level for f in results) for level in ("fail", "warn"))
    if bad:
        console.print(f"{counted(bad, 'problem')} {'prevents' if bad == 1 else 'prevent'} training.", style="bold red")
    elif odd:
        console.print(f"Training can start; {counted(odd, 'warning')}.", style="yellow")
    else:
        console.print("All checks passed.", style="green")
