"""`torchquorum dashboard`: one page of running clusters in a browser."""

from __future__ import annotations

import ipaddress
import signal
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from torchquorum.cli.command import Command, option
from torchquorum.cli.tensorboard import check_free
from torchquorum.cluster.secret import read_access
from torchquorum.cluster.spec import parse_address
from torchquorum.errors import AddressInUseError, ConfigError
from torchquorum.launcher.launched import LaunchedCluster

HOST, PORT = "127.0.0.1", 8265


@click.command(cls=Command)
@click.argument("run", nargs=-1, required=True)
@option("--port", default=PORT, metavar="N", show_default=True, help="port to serve on; 0 for a free one")
@option(
    "--host",
    default=HOST,
    metavar="HOST",
    show_default=True,
    help="address to serve on; 0.0.0.0 for other machines",
)
@option("--secret-file", metavar="FILE", help="file with the cluster's secret")
@option("--open/--no-open", "open_", default=None, help="open a browser; default: only in a terminal")
def dashboard(run: tuple[str, ...], port: int, host: str, secret_file: str | None, open_: bool | None) -> int:
    """Show running clusters on one page that updates itself. RUN is host:port of ps task 0, or a run's folder; there may be several.

    \b
    Examples:
      torchquorum dashboard localhost:2222
      torchquorum dashboard runs/mnist alpha:2222 --port 0
      torchquorum dashboard alpha:2222 --secret-file cluster.secret
    """
    from torchquorum.dashboard.followed import Followed
    from torchquorum.dashboard.server import Dashboard, key_of
    from torchquorum.formats.storage import is_there, locate
    from torchquorum.launcher.watch import Watcher

    access = read_access(secret_file)
    followed = []
    for name in run:
        place = locate(name)
        if is_there(place) or "/" in name:
            if not is_there(place):
                raise ConfigError(f"{name}: no such folder; give a run's folder, or host:port of ps task 0")
            followed.append(Followed(name, None, place))
        else:
            address = str(parse_address(name.split(",")[0], label="RUN"))
            followed.append(Followed(address, Watcher(address, every_s=1.0, access=access)))
    key = key_of(access.secret) if access.secret is not None else ""
    check_free(host, port)
    page = Dashboard(followed, host, port, key)
    click.echo(f"the dashboard of {', '.join(run)}: {page.address} (Ctrl-C ends it)")
    if not key and not _is_loopback(host):
        click.echo("  anybody who can reach this port can see it: a cluster with a secret has a dashboard with a key")
    if open_ if open_ is not None else sys.stdout.isatty():
        webbrowser.open(page.address)
    stop = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())
    page.start()
    try:
        over = page.wait(stop)
    finally:
        page.close()
    click.echo("the run is over, and so is its dashboard" if over else "the dashboard has ended")
    return 0


@contextmanager
def dashboard_beside(wanted: bool, cluster: LaunchedCluster, say: Callable[[str], None]) -> Iterator[None]:
    """Serves the page of a cluster that is being started, until the block ends; does nothing unless `wanted`."""
    if not wanted:
        yield
        return
    from torchquorum.dashboard.followed import Followed
    from torchquorum.dashboard.server import Dashboard, key_of
    from torchquorum.launcher.watch import RunWatcher

    access = cluster.access
    watcher = RunWatcher(cluster.leader, every_s=1.0, access=lambda: cluster.access)
    key = key_of(access.secret) if access.secret is not None else ""
    try:
        check_free(HOST, PORT)
        port = PORT
    except AddressInUseError:
        port = 0  # the page of another run
    page = Dashboard([Followed("this run", watcher)], HOST, port, key)
    say(f"dashboard     {page.address}")
    page.start()
    try:
        yield
        page.finish()
    finally:
        page.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
