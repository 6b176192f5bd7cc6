"""`torchquorum board`: shows a run's folder in TensorBoard.

Runs TensorBoard inside this process and waits for Ctrl-C. Imports it only when the command runs.
"""

from __future__ import annotations

import errno
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path
from types import FrameType
from typing import Any

import click

from torchquorum.cli.command import Command, option
from torchquorum.errors import AddressInUseError, ConfigError
from torchquorum.formats.storage import RemotePath, fetch, locate

EVENTS = "*.tfevents.*"


@click.command(cls=Command)
@click.argument("run")
@option("--port", default=6006, metavar="N", help="port to serve on; 0 for a free one")
@option("--host", default="localhost", metavar="HOST", help="address to serve on; 0.0.0.0 for other machines")
@option("--open/--no-open", "open_", default=None, help="open a browser; default: only in a terminal")
def board(run: str, port: int, host: str, open_: bool | None) -> int:
    """Show a run in TensorBoard. RUN is the run's folder, or a folder with several runs.

    \b
    Examples:
      torchquorum board runs/mnist
      torchquorum board runs --port 0 --no-open
    """
    place = locate(run)
    if not isinstance(place, RemotePath):
        return _show(run, place, host, port, open_, None)
    with tempfile.TemporaryDirectory(prefix="torchquorum-board-") as copy:
        return _show(run, Path(copy), host, port, open_, EventFetcher(place, Path(copy)))


class EventFetcher:
    """Copies the event files of a remote run to this host, again every `EVERY_S`, because TensorBoard reads only local files."""

    EVERY_S = 20.0

    def __init__(self, run: RemotePath, into: Path) -> None:
        self._run, self._into = run, into
        self.fetch()

    def fetch(self) -> None:
        """Copies the files that have grown.

        Raises:
            ConfigError: The run cannot be read.
        """
        try:
            fetch(self._run, self._into, lambda name: ".tfevents." in name)
        except OSError as error:
            raise ConfigError(f"{self._run} cannot be read: {error.strerror}; give a run's folder") from None


def _show(run: str, folder: Path, host: str, port: int, open_: bool | None, fetcher: EventFetcher | None) -> int:
    _check_folder(folder, run)
    check_free(host, port)
    address = _launch(folder, host, port)
    click.echo(f"TensorBoard for {run}: {address} (Ctrl-C ends it)")
    if open_ if open_ is not None else sys.stdout.isatty():
        webbrowser.open(address)
    _wait(fetcher)
    click.echo("TensorBoard has ended")
    return 0


def _check_folder(folder: Path, run: str) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{run}: no such folder; give a run's folder, as in logdir= or --logdir")
    if next(folder.rglob(EVENTS), None) is None:
        raise ConfigError(
            f"{run}: holds no TensorBoard events; train with tq.Session(..., logdir='{run}', "
            "hooks=[tq.SummaryHook()]), or give the folder of another run"
        )


def check_free(host: str, port: int) -> None:
    """Raises AddressInUseError or ConfigError if nothing can be served on an address."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be from 0 to 65535; 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: no such host ({error.strerror})") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"--host {host} --port {port}: cannot serve there ({error.strerror})") from None
            raise AddressInUseError(_in_use(host, port)) from None


def _in_use(host: str, port: int) -> str:
    from torchquorum.wire.procnet import listening_process

    holder = listening_process(port)
    held = f", held by {holder}" if holder is not None else ""
    return f"{host}:{port} is in use{held}; give another --port, or --port 0 for a free one"


def _launch(folder: Path, host: str, port: int) -> str:
    try:
        from tensorboard import program
    except ImportError as error:
        raise ConfigError(f"TensorBoard cannot be imported ({error}); pip install tensorboard") from None
    server = program.TensorBoard()
    server.configure(argv=["tensorboard", "--logdir", str(folder), "--host", host, "--port", str(port)])
    try:
        return server.launch()
    except program.TensorBoardPortInUseError:
        raise AddressInUseError(_in_use(host, port)) from None
    except program.TensorBoardServerException as error:
        raise ConfigError(f"TensorBoard cannot start: {error}") from None


def _wait(fetcher: EventFetcher | None) -> None:
    """Waits for Ctrl-C or SIGTERM; copies the files of a remote run meanwhile."""
    asked = threading.Event()

    def stop(number: int, frame: FrameType | None) -> Any:
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not asked.wait(EventFetcher.EVERY_S if fetcher is not None else None):
        try:
            assert fetcher is not None
            fetcher.fetch()
        except ConfigError as error:
            click.echo(str(error), err=True)
