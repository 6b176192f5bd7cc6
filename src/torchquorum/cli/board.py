"""`torchquorum board`: TensorBoard on a run's folder.

Starts the real TensorBoard inside this process and waits for Ctrl-C. Imports it only when the command runs.
"""

from __future__ import annotations

import errno
import signal
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from types import FrameType
from typing import Any

import click

from torchquorum.cli.shape import Command, option
from torchquorum.errors import AddressInUseError, ConfigError

EVENTS = "*.tfevents.*"


@click.command(cls=Command)
@click.argument("run")
@option("--port", default=6006, metavar="N", help="port to serve on; 0 takes a free one")
@option("--host", default="localhost", metavar="HOST", help="address to serve on; 0.0.0.0 for other machines")
@option("--open/--no-open", "open_", default=None, help="open a browser; if not given, in a terminal only")
def board(run: str, port: int, host: str, open_: bool | None) -> int:
    """Show a run in TensorBoard. RUN is the run's folder, or one with several runs in it.

    \b
    Examples:
      torchquorum board runs/mnist
      torchquorum board runs --port 0 --no-open
    """
    folder = Path(run)
    _check_folder(folder)
    _check_port(host, port)
    address = _launch(folder, host, port)
    click.echo(f"TensorBoard on {folder}: {address} (Ctrl-C ends it)")
    if open_ if open_ is not None else sys.stdout.isatty():
        webbrowser.open(address)
    _wait()
    click.echo("TensorBoard has ended")
    return 0


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; give a run's folder, as in logdir= or --logdir")
    if next(folder.rglob(EVENTS), None) is None:
        raise ConfigError(
            f"{folder}: no TensorBoard events in there; train with tq.Session(..., logdir='{folder}', "
            "hooks=[tq.SummaryHook()]), or give the folder of another run"
        )


def _check_port(host: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be from 0 to 65535; 0 takes a free one")
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
    from torchquorum.transport.procnet import listening_process

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
        raise ConfigError(f"TensorBoard does not start: {error}") from None


def _wait() -> None:
    """Waits for Ctrl-C or SIGTERM."""
    asked = threading.Event()

    def stop(number: int, frame: FrameType | None) -> Any:
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    asked.wait()
