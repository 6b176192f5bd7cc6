"""`torchquorum hello`: the smallest clusters, in a second or two."""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import click

PORTS = (2222, 2223)
DEADLINE_S = 60.0


@click.command(short_help="Show the smallest clusters: a server alone, then two tasks.")
def hello() -> int:
    """Show the smallest clusters: a server alone in this process that greets, then two tasks, the first of which waits.

    \b
    Examples:
      torchquorum hello
    """
    import torch

    torch.set_num_threads(1)  # before the tasks are forked: they inherit torch, but could not inherit its threads
    _warm_up(torch)  # exporting for the first time loads half of torch; the tasks inherit that too
    ports = _choose_ports()
    tasks = _Tasks({"local": [f"localhost:{port}" for port in ports]})
    try:
        click.echo("A server alone:")
        _local_server()
        click.echo("\nTwo tasks, the second of which comes a little later:")
        return tasks.show()
    finally:
        tasks.end()


def join_letters(first: Any, second: Any) -> Any:
    """The graph that all of this runs."""
    import torch

    return torch.cat([first, second])


def _warm_up(torch: Any) -> None:
    from torchquorum.worker.graph_export import export_program

    class Greeting(torch.nn.Module):
        def forward(self, first: Any, second: Any) -> Any:
            return join_letters(first, second)

    export_program(Greeting(), (letters("Hello, "), letters("you")), batch=False)


def letters(text: str) -> Any:
    """Returns a text as a tensor of bytes, since a tensor cannot hold words."""
    import torch

    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _local_server() -> None:
    import torchquorum as tq

    with tq.Server.create_local_server() as server:
        click.echo(f"  server.target is {server.target}")
        with tq.connect(server.target) as client:
            greeting = client.run(join_letters, letters("Hello, distributed "), letters("torchquorum!"))
        click.echo(f"  {bytes(greeting.tolist()).decode()}")


def _choose_ports() -> list[int]:
    """Returns the tutorials' ports if they are free, otherwise two others."""
    chosen: list[int] = []
    held = []
    try:
        for port in PORTS:
            s = socket.socket()
            held.append(s)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                s.bind(("127.0.0.1", 0))
                click.echo(f"port {port} is in use; taking {s.getsockname()[1]} instead")
            chosen.append(s.getsockname()[1])
    finally:
        for s in held:
            s.close()
    return chosen


class _Tasks:
    """Two processes, forked before anything else runs in this one; each begins when it is told to."""

    def __init__(self, cluster: dict[str, list[str]]) -> None:
        import multiprocessing

        context = multiprocessing.get_context("fork")
        self._begin = [context.Event() for _ in range(2)]
        self._first_waits = context.Event()
        done = context.Barrier(2)
        self._processes = [
            context.Process(target=_run_task, args=(cluster, index, self._begin[index], waits, done), daemon=True)
            for index, waits in enumerate([self._first_waits, None])
        ]
        for process in self._processes:
            process.start()

    def show(self) -> int:
        """Lets the first begin, then, when it says that it waits, the second, and waits for both."""
        deadline = time.monotonic() + DEADLINE_S
        self._begin[0].set()
        while not self._first_waits.wait(0.05) and self._processes[0].exitcode is None and time.monotonic() < deadline:
            pass
        self._begin[1].set()
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [str(i) for i, process in enumerate(self._processes) if process.exitcode is None]
        if late:
            click.echo(f"torchquorum: error: task {', '.join(late)} did not end within {DEADLINE_S:.0f} s", err=True)
        return 0 if all(process.exitcode == 0 for process in self._processes) else 1

    def end(self) -> None:
        """Leaves no process behind."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(5.0)


class _Heard:
    """Standard error, and word of the first line on it: that the task waits."""

    def __init__(self, heard: Any) -> None:
        self._heard, self._stream = heard, sys.stderr

    def write(self, text: str) -> int:
        """Writes, and lets it be known."""
        self._heard.set()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _run_task(cluster: dict[str, list[str]], index: int, begin: Any, waits: Any, done: Any) -> None:
    """One of the two tasks: a server and a client of the whole cluster, as in the tutorials."""
    from torchquorum.launcher.local import die_with_parent

    die_with_parent()
    if not begin.wait(DEADLINE_S):
        return
    if waits is not None:
        sys.stderr = _Heard(waits)
    import torchquorum as tq
    from torchquorum.errors import TorchQuorumError

    try:
        with tq.Server(cluster, job_name="local", task_index=index) as server:
            click.echo(f"  {server.task} serves on {server.target}")
            with tq.connect(server.target, log_device_placement=True, wait_s=DEADLINE_S / 2) as client:
                _greet(client, index)
            done.wait(DEADLINE_S / 2)  # the other may still need us
    except TorchQuorumError as error:
        click.echo(f"torchquorum: error: {error}", err=True)
        sys.exit(1)


def _greet(client: Any, index: int) -> None:
    """The first task greets on itself and then on the second; what the second defines runs on the first, too."""
    for place in [0, 1] if index == 0 else [None]:
        greeting = client.run(join_letters, letters("Hello from server "), letters(f"{(place or 0) + 1}!"), on=place)
        click.echo(f"  /job:local/task:{index} got: {bytes(greeting.tolist()).decode()}")
